"""What has a gradient and nothing more says so, instead of failing inside JAX."""

import functools
from collections.abc import Callable
from typing import NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def forbid_higher_order(op: Callable, operator: str) -> Callable:
    """`op`, a part of the operator of this name, which is not to be differentiated again."""
    guarded = jax.custom_jvp(op)
    guarded.defjvp(functools.partial(_refuse, operator=operator))
    return guarded


def reverse_mode_only(operator: str, *arrays: jax.Array) -> list[jax.Array]:
    """The arrays, whose tangents may be transposed but not computed."""
    return _reverse_only_p.bind(*arrays, operator=operator)


def _refuse(*_, operator: str) -> NoReturn:
    raise NotImplementedError(
        f"The native kernels of {operator} have a first derivative in reverse mode; it has "
        'forward mode and second derivatives only with `implementation="xla"`'
        f"{_BESIDES.get(operator, '')}."
    )


# What an operator needs for them besides.
_BESIDES = {"roi_align": " and a `sampling_ratio` above 0"}


def _jvp(primals, tangents, *, operator: str):
    # The primals themselves: what is kept of them for the backward pass is then no copy. The
    # tangents together: some may be known (zeros), and are not computed for the others' sake.
    known = (t for t in tangents if type(t) is not ad.Zero)
    moved = iter(_tangents_p.bind(*known, operator=operator))
    return list(primals), [t if type(t) is ad.Zero else next(moved) for t in tangents]


_reverse_only_p = Primitive("effjax_reverse_only")
_reverse_only_p.multiple_results = True
_reverse_only_p.def_abstract_eval(lambda *arrays, operator: list(arrays))
_reverse_only_p.def_impl(lambda *arrays, operator: list(arrays))
mlir.register_lowering(_reverse_only_p, lambda _, *arrays, operator: list(arrays))
batching.primitive_batchers[_reverse_only_p] = lambda arrays, axes, *, operator: (
    reverse_mode_only(operator, *arrays),
    axes,
)
ad.primitive_jvps[_reverse_only_p] = _jvp

# Tangents on their way. Reverse mode transposes this, and does nothing else with it.
_tangents_p = Primitive("effjax_reverse_only_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_abstract_eval(lambda *tangents, operator: list(tangents))
_tangents_p.def_impl(_refuse)
mlir.register_lowering(_tangents_p, _refuse)
batching.primitive_batchers[_tangents_p] = _refuse
ad.primitive_jvps[_tangents_p] = _refuse
ad.primitive_transposes[_tangents_p] = lambda cotangents, *tangents, operator: [
    ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, tangents, strict=True)
]
