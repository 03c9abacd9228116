"""Flax linen modules over the operators of effjax.

Each module has the name of its counterpart in `effjax.nnx`, except for `OffloadTrainState`, the
counterpart of `effjax.nnx.OffloadOptimizer`. `effjax.nnx` explains this and the names that only nnx
needs.
"""

from typing import TYPE_CHECKING

from .._names import list_public as _list_public
from .._names import missing_name as _missing_name
from .batch_norm import BatchNorm as BatchNorm
from .convert import convert_batch_norm as convert_batch_norm
from .deform_attention import DCNv3 as DCNv3
from .deform_attention import MSDeformAttn as MSDeformAttn
from .deform_conv import DeformConv as DeformConv
from .dense_block import DenseBlock as DenseBlock
from .offload import OffloadModel as OffloadModel
from .offload_train_state import OffloadTrainState as OffloadTrainState
from .roi import DeformRoIPool as DeformRoIPool
from .roi import DeformRoIPoolPack as DeformRoIPoolPack
from .roi import ModulatedDeformRoIPoolPack as ModulatedDeformRoIPoolPack


def __dir__() -> list[str]:
    return _list_public(globals())


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> None:
        raise _missing_name(__name__, name)
