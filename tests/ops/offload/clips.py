"""Clipping of gradients in memory, as optax transformations of all parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(tree)))


def clipped(tree, norm, clip_norm):
    factor = jnp.minimum(1, clip_norm / norm)  # 1 for a norm of 0
    return jax.tree.map(lambda a: a * factor, tree)


def by_previous(clip_norm):
    """Clip by the norm of the previous gradients."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return clipped(grads, state, clip_norm), norm_of(grads)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def by_group(clip_norm, group_of):
    """Clip the gradients of each group by their norm; `group_of` maps a path to a group."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        groups = {}
        for path, g in jax.tree_util.tree_leaves_with_path(grads):
            groups.setdefault(group_of(path), []).append(g)
        norms = {group: norm_of(gradients) for group, gradients in groups.items()}
        grads = jax.tree_util.tree_map_with_path(
            lambda path, g: clipped(g, norms[group_of(path)], clip_norm), grads
        )
        return grads, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_layer(clip_norm):
    """Clip ``{"layers": [...], "others": ...}`` by layer."""
    return by_group(clip_norm, lambda path: path[: 2 if path[0].key == "layers" else 1])


CLIPS = {
    "global": optax.clip_by_global_norm,
    "previous": by_previous,
    "layer": by_layer,
}
