"""Weights of PyTorch projects to Flax, and back."""

from .deform_conv import convert_deform_conv as convert_deform_conv
from .files import read as read
from .files import write as write
from .tables import DCNV3 as DCNV3
from .tables import DEFORM_CONV as DEFORM_CONV
from .tables import DENSENET as DENSENET
from .tables import RESNET as RESNET
from .tables import Table as Table
from .weights import from_torch as from_torch
from .weights import to_torch as to_torch
