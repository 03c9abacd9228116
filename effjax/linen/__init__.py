"""Flax linen modules over the operators of effjax."""

from .._deprecated import moved
from .batch_norm import BatchNorm as BatchNorm
from .deform_conv import DeformConv as DeformConv
from .deform_conv import DeformConvPack as DeformConvPack
from .deform_conv import DFConv2d as DFConv2d
from .deform_conv import ModulatedDeformConv as ModulatedDeformConv
from .deform_conv import ModulatedDeformConvPack as ModulatedDeformConvPack
from .offload import OffloadModel as OffloadModel

__getattr__ = moved(__name__, DenseNet="effjax.models.linen")
