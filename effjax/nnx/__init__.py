"""Flax NNX modules over the operators of effjax.

Those of `effjax.linen` have the same names. `revert_batch_norm` is here alone: linen's
`convert_batch_norm` leaves the model as it is.
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
