"""Validation of the native kernels on the user's GPU: `effjax doctor --gpu`."""

from .run import NoKernelsError as NoKernelsError
from .run import find_failures as find_failures
from .run import find_untested as find_untested
from .run import measure_programs as measure_programs
from .run import outcomes as outcomes
from .run import validate as validate
