"""Conversion of PyTorch weights to Flax and back."""

from .._names import list_public as _list_public
from .adapter import load_adapter as load_adapter
from .adapter import save_adapter as save_adapter
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .detector import load_detector as load_detector
from .detector import save_detector as save_detector
from .files import load_weights as load_weights
from .files import save_weights as save_weights
from .tables import DCNV3 as DCNV3
from .tables import DEFORM_CONV as DEFORM_CONV
from .tables import DEFORM_ROI_POOL as DEFORM_ROI_POOL
from .tables import DENSENET as DENSENET
from .tables import MASKRCNN_PYRAMID as MASKRCNN_PYRAMID
from .tables import MASKRCNN_RESNET as MASKRCNN_RESNET
from .tables import MASKRCNN_RETINANET as MASKRCNN_RETINANET
from .tables import PYRAMID as PYRAMID
from .tables import RESNET as RESNET
from .tables import TORCHVISION_PYRAMID as TORCHVISION_PYRAMID
from .tables import TORCHVISION_RETINANET as TORCHVISION_RETINANET
from .tables import Table as Table
from .tables import join_tables as join_tables
from .weights import from_torch as from_torch
from .weights import to_torch as to_torch


def __dir__() -> list[str]:
    return _list_public(globals())
