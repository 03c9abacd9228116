"""What a policy keeps of a slice for its backward pass, and the gradients from that."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from .loops import scan
from .trainable import trained_of, with_trained
from .trees import Tree, floats_of, merge


class Residuals(NamedTuple):
    """``pull(arrays, w, shared, rest, cotangents) -> [dw, dshared, dx]``, and the arrays."""

    arrays: list
    pull: Callable  # a pytree without leaves


def keep(fun: Callable, policy: Callable, w: Tree, shared: Tree, rest: tuple, x: Tree):
    """(result, residuals) of ``fun(w, shared, x, *rest)``; gradients are those of the floats.

    What the backward pass has is not kept: w, `shared`, `rest`, and what follows from the first two
    alone, such as a cast.
    """

    def keeps(*args, **params):
        decision = policy(*args, **params)
        return True if hasattr(decision, "dst") else decision  # `activations` says where

    def linearized(w, shared, rest, x):
        def run(trained, shared_floats, x_floats):
            at = with_trained(w, trained), merge(shared, shared_floats), merge(x, x_floats)
            result = jax.checkpoint(fun, policy=keeps, prevent_cse=False)(*at, *rest)
            return floats_of(result), result

        _, pull, result = jax.vjp(run, trained_of(w), floats_of(shared), floats_of(x), has_aux=True)
        return result, pull

    args = w, shared, rest, x
    closed, (result, pull) = jax.make_jaxpr(linearized, return_shape=True)(*args)
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(result))
    outputs, residuals = jaxpr.outvars[:count], jaxpr.outvars[count:]
    given = jaxpr.invars[: len(jax.tree.leaves(args[:3]))]
    late, early = set(jaxpr.invars[len(jax.tree.leaves(args[:2])) :]), []
    for eqn in jaxpr.eqns:
        if eqn.effects or late.intersection(_variables(eqn.invars)):
            late.update(eqn.outvars)
        else:
            early.append(eqn)
    kept = [v for v in dict.fromkeys(_variables(residuals)) if v in late and v not in given]
    others = [v for v in residuals if isinstance(v, Literal) or v not in kept]
    forward = jaxpr.replace(outvars=[*outputs, *kept])
    again = jaxpr.replace(invars=given, outvars=others, eqns=early)

    def pull_back(arrays, w, shared, rest, cotangents):
        here = _run(again, closed.consts, (w, shared, rest))
        known = dict(zip(map(id, [*kept, *others]), [*arrays, *here], strict=True))
        leaves = [known[id(v)] for v in residuals]
        return jax.tree.unflatten(jax.tree.structure(pull), leaves)(cotangents)

    values = _run(forward, closed.consts, args)
    result = jax.tree.unflatten(jax.tree.structure(result), values[:count])
    return result, Residuals(values[count:], jax.tree_util.Partial(pull_back))


def keep_each(layer: Callable, policy: Callable, w: Tree, shared: Tree, rest: tuple, x: Tree):
    """`keep` for layers one after the other: w, aux and what is kept are [L, ...].

    ``layer(w, shared, x, *rest, i) -> (x, aux)``.
    """
    count, num_floats = jax.tree.leaves(w)[0].shape[0], len(floats_of(x))

    def forward(x, at):
        w, i = at
        (x, aux), kept = keep(layer, policy, w, shared, (*rest, i), x)
        return x, (aux, kept)

    x, (aux, (arrays, pull)) = scan(forward, x, (w, jnp.arange(count)))

    def pull_back(arrays, w, shared, rest, cotangents):
        def backward(state, at):
            dx, dshared = state
            arrays, w, i, daux = at
            dw, more, dx = pull(arrays, w, shared, (*rest, i), [*dx, *daux])
            return (dx, jax.tree.map(jnp.add, dshared, more)), dw

        dx, daux = cotangents[:num_floats], cotangents[num_floats:]
        state = dx, [jnp.zeros_like(a) for a in floats_of(shared)]
        at = arrays, w, jnp.arange(count), daux
        (dx, dshared), dw = scan(backward, state, at, reverse=True)
        return dw, dshared, dx

    return (x, aux), Residuals(arrays, jax.tree_util.Partial(pull_back))


def _run(jaxpr, consts, args):
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*jax.tree.leaves(args))


def _variables(atoms: list) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]
