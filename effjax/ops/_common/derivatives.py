"""Clear errors for unsupported forward-mode and higher-order derivatives."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def needs_xla(operator: str, *requirements: str) -> str:
    """Return the error for other derivatives, which need XLA and these requirements."""
    # effjax.compat, whose functions have PyTorch's arguments, uses these operators too.
    needed = " and ".join([f'`implementation="xla"` of effjax.{operator}', *requirements])
    return (
        f"{operator} supports only first derivatives in reverse mode with these options. Forward "
        f"mode and second derivatives need {needed}."
    )


def forbid_higher_order(op: Callable, error: str) -> Callable:
    """Return `op` such that differentiating it raises NotImplementedError."""
    # The forward and backward passes of a custom_vjp are wrapped in this: JAX differentiates them
    # only for a second derivative.
    return lambda *arrays: op(*_first_order_only_p.bind(*arrays, error=error))


def forbid_forward_mode(operator: str, tree: Any) -> Any:
    """Return the arguments of a public function such that their tangents raise an error."""
    error = (
        f"{operator} does not support forward-mode differentiation (jvp). Use reverse mode, as in "
        "jax.grad or jax.vjp."
    )
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(reverse_mode_only(error, *leaves))


def reverse_mode_only(error: str, *arrays: jax.Array) -> list[jax.Array]:
    """Return the arrays such that computing their tangents raises NotImplementedError."""
    return _reverse_only_p.bind(*arrays, error=error)


def _raise_error(*_, error: str) -> NoReturn:
    raise NotImplementedError(error)


def _make_identity(name: str) -> Primitive:
    """Return a primitive ``bind(*arrays, error=error)`` that returns the arrays."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *arrays, error: list(arrays))
    primitive.def_impl(lambda *arrays, error: list(arrays))
    mlir.register_lowering(primitive, lambda _, *arrays, error: list(arrays))
    batching.primitive_batchers[primitive] = lambda arrays, axes, *, error: (
        primitive.bind(*arrays, error=error),
        axes,
    )
    return primitive


# A primitive, because JAX forgets the rule of a custom_jvp when it differentiates a scan.
_first_order_only_p = _make_identity("effjax_first_order_only")
ad.primitive_jvps[_first_order_only_p] = _raise_error

# Forward mode on a custom_vjp fails deep inside JAX, but reverse mode also starts with jvp. So the
# inputs pass through an identity whose jvp rule binds a second primitive to the tangents. Reverse
# mode only transposes that primitive. Evaluating, lowering or differentiating it means forward mode
# or a second derivative, and raises the error.


def _jvp(primals, tangents, *, error: str):
    # The primals are returned unchanged, so residuals are no copies. The nonzero tangents share one
    # primitive; zeros stay symbolic, and no gradient is computed for them.
    nonzero = (t for t in tangents if type(t) is not ad.Zero)
    results = iter(_tangents_p.bind(*nonzero, error=error))
    return list(primals), [t if type(t) is ad.Zero else next(results) for t in tangents]


_reverse_only_p = _make_identity("effjax_reverse_only")
ad.primitive_jvps[_reverse_only_p] = _jvp

_tangents_p = Primitive("effjax_reverse_only_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_abstract_eval(lambda *tangents, error: list(tangents))
_tangents_p.def_impl(_raise_error)
mlir.register_lowering(_tangents_p, _raise_error)
batching.primitive_batchers[_tangents_p] = _raise_error
ad.primitive_jvps[_tangents_p] = _raise_error
ad.primitive_transposes[_tangents_p] = lambda cotangents, *tangents, error: [
    ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, tangents, strict=True)
]
