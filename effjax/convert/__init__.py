"""Weights of PyTorch projects to Flax, and back."""

from .deform_conv import convert_deform_conv as convert_deform_conv
from .files import read as read
from .files import write as write
from .tables import BENCHMARK_PYRAMID as BENCHMARK_PYRAMID
from .tables import BENCHMARK_RESNET as BENCHMARK_RESNET
from .tables import BENCHMARK_RETINANET as BENCHMARK_RETINANET
from .tables import DCNV3 as DCNV3
from .tables import DEFORM_CONV as DEFORM_CONV
from .tables import DEFORM_ROI_POOL as DEFORM_ROI_POOL
from .tables import DENSENET as DENSENET
from .tables import PYRAMID as PYRAMID
from .tables import RESNET as RESNET
from .tables import TORCHVISION_PYRAMID as TORCHVISION_PYRAMID
from .tables import TORCHVISION_RETINANET as TORCHVISION_RETINANET
from .tables import Table as Table
from .tables import joined as joined
from .weights import from_torch as from_torch
from .weights import to_torch as to_torch
