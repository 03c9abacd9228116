"""Flax linen modules over the operators of effjax.

Each module has the name of its counterpart in `effjax.nnx`.
"""

from .batch_norm import BatchNorm as BatchNorm
from .convert import convert_batch_norm as convert_batch_norm
from .deform_attention import DCNv3 as DCNv3
from .deform_attention import MSDeformAttn as MSDeformAttn
from .deform_conv import DeformConv as DeformConv
from .offload import OffloadModel as OffloadModel
from .offload_train_state import OffloadTrainState as OffloadTrainState
from .roi import DeformRoIPool as DeformRoIPool
from .roi import DeformRoIPoolPack as DeformRoIPoolPack
from .roi import ModulatedDeformRoIPoolPack as ModulatedDeformRoIPoolPack
