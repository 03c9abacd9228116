"""The layers of a training step: a stack of like ones, or a list of unlike ones."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import sequential, stack, update_list, update_stack
from .optimizer import apply
from .options import OffloadOptions
from .placement import write
from .scaling import measure, unmeasured
from .trainable import Parts
from .trees import Tree, floats_of, join


class Passed(NamedTuple):
    """Layers after their forward pass; dy are the leaves that are no integers."""

    y: Tree
    aux: Tree
    update_meanwhile: Callable  # (tx, state, dy) -> (trained parameters, state, dx)
    collect: Callable  # (scale, dy) -> (gradients, Measured, dx)


class Form(NamedTuple):
    """``forward(layer, params, x, key, options) -> Passed``, and what updates such layers."""

    forward: Callable
    update: ModuleType  # update_stack or update_list
    without: frozenset = frozenset()  # options that are not for it


def _forward_stack(
    layer: Callable, params: Parts, x: Tree, key: Any, options: OffloadOptions
) -> Passed:
    this, params, shared, x = stack.prepare(layer, params, x, key, options)
    y, aux, kept = stack.run_forward(this, params, shared, x, key, keep=True)
    daux = [jnp.zeros_like(a) for a in floats_of(aux)]

    def run(dy, consume, carry):
        return stack.run_backward(this, params, shared, key, kept, dy, daux, consume, carry)[:3]

    def update_meanwhile(tx, state, dy):
        consume = functools.partial(update_stack.update_slice, tx)
        trained, state, dx = run(dy, consume, stack.by_slice(state, this))
        return trained, join(state), dx

    def collect(scale, dy):
        def consume(trained, carry, i, w, dw):
            grads, found = carry
            return trained, (write(grads, dw, i), measure(found, dw, scale))

        grads = stack.empty_slices(this, params.trained, options.grads_in)
        _, (grads, found), dx = run(dy, consume, (grads, unmeasured()))
        return join(grads), found, dx

    return Passed(y, aux, update_meanwhile, collect)


def _forward_list(
    layers: Sequence[Callable], params: Parts, x: Tree, key: Any, options: OffloadOptions
) -> Passed:
    this, by_slice, shared, x = sequential.prepare(layers, params, x, key, options)
    y, aux, kept = sequential.run_forward(this, by_slice, shared, x, key, keep=True)
    daux = [[jnp.zeros_like(a) for a in floats_of(some)] for some in aux]

    def run(dy, consume, carry, more):
        """(what like the trained parameters, what like `more`, carry, dx)"""
        more = sequential.cut(this.bounds, more)
        results, carry, dx, _ = sequential.run_backward(
            this, by_slice, shared, key, kept, dy, daux, consume, carry, more
        )
        return *zip(*results, strict=True), carry, dx

    def like(params, results):
        return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(results))

    def update_meanwhile(tx, state, dy):
        def consume(carry, w, dw, state):
            new = [apply(tx, *one) for one in zip(w, state, dw, strict=True)]
            return carry, ([w for w, _ in new], [s for _, s in new])

        trained, new, _, dx = run(dy, consume, (), state)
        return like(params.trained, trained), like(state, new), dx

    def collect(scale, dy):
        def consume(found, w, dw, none):
            return measure(found, dw, scale), (dw, none)

        grads, _, found, dx = run(dy, consume, unmeasured(), [()] * len(layers))
        return like(params.trained, grads), found, dx

    return Passed(y, aux, update_meanwhile, collect)


STACK = Form(_forward_stack, update_stack)
LIST = Form(_forward_list, update_list, frozenset({"prefetch", "resident_slices"}))
