"""Flax NNX modules over the operators of effjax.

Each module has the name of its counterpart in `effjax.linen`. Only this package needs
`revert_batch_norm`: linen's `convert_batch_norm` does not change the model that it converts.
"""

from .batch_norm import BatchNorm as BatchNorm
from .compiled import offload_jit as offload_jit
from .convert import convert_batch_norm as convert_batch_norm
from .convert import revert_batch_norm as revert_batch_norm
from .deform_attention import DCNv3 as DCNv3
from .deform_attention import MSDeformAttn as MSDeformAttn
from .deform_conv import DeformConv as DeformConv
from .offload import OffloadModel as OffloadModel
from .offload_optimizer import OffloadOptimizer as OffloadOptimizer
from .roi import DeformRoIPool as DeformRoIPool
from .roi import DeformRoIPoolPack as DeformRoIPoolPack
from .roi import ModulatedDeformRoIPoolPack as ModulatedDeformRoIPoolPack
