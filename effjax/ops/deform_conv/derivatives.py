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


def reverse_only(x: jax.Array) -> jax.Array:
    """x, whose tangent may be transposed but not computed."""
    return _reverse_only_p.bind(x)


def _refuse(*_, **__) -> NoReturn:
    raise NotImplementedError(
        "deform_conv2d has forward mode and derivatives of second order only with "
        '`implementation="xla"`.'
    )


_reverse_only_p = Primitive("effjax_reverse_only")
_reverse_only_p.def_abstract_eval(lambda x: x)
_reverse_only_p.def_impl(lambda x: x)
mlir.register_lowering(_reverse_only_p, lambda _, x: [x])
batching.defvectorized(_reverse_only_p)
ad.primitive_jvps[_reverse_only_p] = lambda primals, tangents: (
    reverse_only(*primals),
    t if type(t := tangents[0]) is ad.Zero else _tangent_p.bind(t),
)

# A tangent on its way. Reverse mode transposes this, and does nothing else with it.
_tangent_p = Primitive("effjax_reverse_only_tangent")
_tangent_p.def_abstract_eval(lambda t: t)
_tangent_p.def_impl(_refuse)
mlir.register_lowering(_tangent_p, _refuse)
batching.primitive_batchers[_tangent_p] = _refuse
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
