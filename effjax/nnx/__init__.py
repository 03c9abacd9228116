"""Flax NNX modules over the operators of effjax.

Each module has the name of its counterpart in `effjax.linen`. The only differences:

- `OffloadOptimizer` is the counterpart of Flax's ``nnx.Optimizer``. Linen programs keep parameters
  and optimizer in a ``TrainState``, so its counterpart is `effjax.linen.OffloadTrainState`.
- `offload_jit` compiles functions of modules, as ``nnx.jit`` does. Linen's functions take arrays,
  and use `effjax.offload_jit`.
- `revert_batch_norm` undoes `convert_batch_norm`, which changes the model. Linen's returns another
  model, so it needs no inverse.
"""

from typing import TYPE_CHECKING

from .._names import list_public as _list_public
from .._names import missing_name as _missing_name
from .batch_norm import BatchNorm as BatchNorm
from .compiled import offload_jit as offload_jit
from .convert import convert_batch_norm as convert_batch_norm
from .convert import revert_batch_norm as revert_batch_norm
from .deform_attention import DCNv3 as DCNv3
from .deform_attention import MSDeformAttn as MSDeformAttn
from .deform_conv import DeformConv as DeformConv
from .dense_block import DenseBlock as DenseBlock
from .offload import OffloadModel as OffloadModel
from .offload_optimizer import OffloadOptimizer as OffloadOptimizer
from .roi import DeformRoIPool as DeformRoIPool
from .roi import DeformRoIPoolPack as DeformRoIPoolPack
from .roi import ModulatedDeformRoIPoolPack as ModulatedDeformRoIPoolPack


def __dir__() -> list[str]:
    return _list_public(globals())


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> None:
        raise _missing_name(__name__, name)
