"""Validation of the native kernels and of plans on the user's GPU: `effjax doctor --gpu`."""

from .run import NoKernelsError as NoKernelsError
from .run import find_problems as find_problems
from .run import measure_programs as measure_programs
from .run import outcomes as outcomes
from .run import validate as validate
