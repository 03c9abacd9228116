"""What has a gradient and nothing more says so, instead of failing inside JAX."""

from collections.abc import Callable
from typing import NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def first_order(op: Callable) -> Callable:
    """`op`, which is not to be differentiated again."""
    guarded = jax.custom_jvp(op)
    guarded.defjvp(_refuse)
    return guarded


def reverse_only(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, whose tangents may be transposed but not computed."""
    return _reverse_only_p.bind(*arrays)


def _refuse(*_, **__) -> NoReturn:
    raise NotImplementedError(
        "The native kernels of deform_conv2d have a first derivative in reverse mode; it has "
        'forward mode and second derivatives only with `implementation="xla"`.'
    )


def _jvp(primals, tangents):
    # The primals themselves: what is kept of them for the backward pass is then no copy. The
    # tangents together: some may be known (zeros), and are not computed for the others' sake.
    moved = iter(_tangents_p.bind(*(t for t in tangents if type(t) is not ad.Zero)))
    return list(primals), [t if type(t) is ad.Zero else next(moved) for t in tangents]


_reverse_only_p = Primitive("effjax_reverse_only")
_reverse_only_p.multiple_results = True
_reverse_only_p.def_abstract_eval(lambda *arrays: list(arrays))
_reverse_only_p.def_impl(lambda *arrays: list(arrays))
mlir.register_lowering(_reverse_only_p, lambda _, *arrays: list(arrays))
batching.primitive_batchers[_reverse_only_p] = lambda arrays, axes: (reverse_only(*arrays), axes)
ad.primitive_jvps[_reverse_only_p] = _jvp

# Tangents on their way. Reverse mode transposes this, and does nothing else with it.
_tangents_p = Primitive("effjax_reverse_only_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_abstract_eval(lambda *tangents: list(tangents))
_tangents_p.def_impl(_refuse)
mlir.register_lowering(_tangents_p, _refuse)
batching.primitive_batchers[_tangents_p] = _refuse
ad.primitive_jvps[_tangents_p] = _refuse
ad.primitive_transposes[_tangents_p] = lambda cotangents, *tangents: [
    ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, tangents, strict=True)
]
