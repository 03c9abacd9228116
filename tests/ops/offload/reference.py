"""Training in memory with the options of `offload_train_step`, by jax.grad and optax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.ops.offload.stacks import key_of

# Clipping of all gradients.


def clip_by_previous_norm(clip_norm):
    """Clip by the last finite norm of the gradients."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads)
        return _scale(grads, state, clip_norm), jnp.where(jnp.isfinite(norm), norm, state)

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def clip_by_group_norm(clip_norm, group_of):
    """Clip the gradients of each group by their norm; `group_of` maps a path to a group."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        groups = {}
        for path, g in jax.tree_util.tree_leaves_with_path(grads):
            groups.setdefault(group_of(path), []).append(g)
        norms = {group: optax.tree.norm(gradients) for group, gradients in groups.items()}
        grads = jax.tree_util.tree_map_with_path(
            lambda path, g: _scale(g, norms[group_of(path)], clip_norm), grads
        )
        return grads, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def clip_by_layer_norm(clip_norm):
    """Clip ``{"layers": [...], "others": ...}`` by layer."""
    return clip_by_group_norm(clip_norm, lambda path: path[: 2 if path[0].key == "layers" else 1])


def _scale(grads, norm, clip_norm):
    factor = jnp.minimum(1, clip_norm / norm)  # 1 for a norm of 0
    return jax.tree.map(lambda g: g * factor, grads)


CLIPS = {
    "global": optax.clip_by_global_norm,
    "previous": clip_by_previous_norm,
    "layer": clip_by_layer_norm,
}


# Training.


class Options(NamedTuple):
    """The options of `offload_train_step` that change results."""

    clip_norm: float | None = None
    clip_by: str = "global"
    loss_scale: float | None = None
    skip_nonfinite: bool = False
    weighted_loss: bool = False
    has_aux: bool = False
    head_has_aux: bool = False
    has_state: bool = False
    trainable: Any = True
    trainable_others: Any = True
    num_microbatches: int = 1
    compute_dtype: Any = None


class Trained(NamedTuple):
    """The results of training."""

    losses: list
    layers: Any
    others: Any
    model_state: Any
    loss_scales: list  # after each step
    last_norm: Any  # the last finite norm of the gradients, with clip_by="previous"; else ()
    aux: Any  # of the layers in the last step: [L, M, ...], or a list of [M, ...]; or None
    head_aux: Any  # of the last step: [M, ...]; or None
    grad_norm: Any  # of the gradients of the last step, before clipping


def train(
    embed, layer, head, tx, layers, others, batches, *, key=None, model_state=(), compiled=False,
    **options,
):  # fmt: skip
    """Take one step per batch, in the dtypes of the parameters; step i folds the key with i.

    Options that do not change results are ignored. Compilation costs as much as a few steps whose
    operations were compiled in other tests.
    """
    options = Options(**{n: a for n, a in options.items() if n in Options._fields})
    is_list = isinstance(layer, (list, tuple))
    trained_layers, frozen_layers = partition(layers, options.trainable)
    trained_others, frozen_others = partition(others, options.trainable_others)
    if is_list:
        run_layers = layer
    else:
        run_layers = [layer] * len(jax.tree.leaves(layers)[0])
        trained_layers = unstack(trained_layers, len(run_layers))
        frozen_layers = unstack(frozen_layers, len(run_layers))
    frozen = {"layers": list(frozen_layers), "others": frozen_others}
    model = {"layers": list(trained_layers), "others": trained_others}

    def loss_of_trained(model, *args):
        return compute_loss(embed, run_layers, head, merge(model, frozen), *args, options)

    step, clip = make_step(loss_of_trained, tx, options)
    step = jax.jit(step) if compiled else step
    states = [own_keys(tx.init(w), i) for i, w in enumerate(model["layers"])]
    states.append(tx.init(model["others"]))
    state = model, states, clip.init(model)
    scale, losses, scales = jnp.float32(options.loss_scale or 1), [], []
    for i, batch in enumerate(batches):
        step_key = None if key is None else jax.random.fold_in(key, i)
        state, scale, model_state, loss, *results = step(state, scale, model_state, batch, step_key)
        losses.append(loss)
        scales.append(scale)
    model, last_norm = merge(state[0], frozen), state[2]
    layers_aux, head_aux, grad_norm = results
    layers_aux = layers_aux if options.has_aux else None
    if is_list:
        new_layers = type(layers)(model["layers"])
    else:
        new_layers = stack(model["layers"])
        layers_aux = stack(layers_aux) if options.has_aux else None
    last_norm = last_norm if options.clip_by == "previous" else ()
    return Trained(
        losses, new_layers, model["others"], model_state, scales, last_norm, layers_aux, head_aux,
        grad_norm,
    )  # fmt: skip


def compute_loss(embed, run_layers, head, model, model_state, batch, key, options):
    """Return the loss, and (model_state, aux of the layers, aux of the head)."""
    microbatches = split_rows(batch, options.num_microbatches)
    states = (model_state,) if options.has_state else ()
    xs, losses, weights, layers_aux, head_aux = [], [], [], [], []
    for m, rows in enumerate(microbatches):
        x = embed(model["others"], *states, rows, key_of(key, len(run_layers), m))
        if options.has_state:
            x, new = x
            states = (lax.stop_gradient(new),)
        xs.append(x)
    for i, (run_layer, w) in enumerate(zip(run_layers, model["layers"], strict=True)):
        w = cast(w, options.compute_dtype)
        xs = [run_layer(w, x, key_of(key, i, m)) for m, x in enumerate(xs)]
        if options.has_aux:
            xs, aux = zip(*xs, strict=True)
            layers_aux.append(stack(aux))
    for m, (x, rows) in enumerate(zip(xs, microbatches, strict=True)):
        results = head(model["others"], *states, x, rows, key_of(key, len(run_layers) + 1, m))
        loss, *rest = results if options.has_state or options.head_has_aux else [results]
        if options.has_state:
            states = (lax.stop_gradient(rest.pop(0)),)
        loss, weight = loss if options.weighted_loss else (loss, 1)
        losses.append(loss)
        weights.append(lax.stop_gradient(weight))
        head_aux += rest
    total = sum(weights)
    loss = jnp.where(total == 0, 0, sum(losses) / jnp.where(total == 0, 1, total))
    model_state = states[0] if options.has_state else ()
    return loss, (model_state, layers_aux, stack(head_aux) if head_aux else None)


def make_step(loss_fn, tx, options):
    """Return a training step, and the transformation that clips the gradients."""
    clip, clip_norm = optax.identity(), options.clip_norm
    if clip_norm is not None:
        clip = CLIPS[options.clip_by](clip_norm)

    def update(grads, model, states, clip_state):
        """Clip all gradients, and update one layer at a time."""
        grads, clip_state = clip.update(grads, clip_state)
        new_params, new_states = [], []
        for g, state, w in zip(split_model(grads), states, split_model(model), strict=True):
            new_w, new_state = w, state
            if w is not None:  # a frozen array; None has another meaning in optax
                updates, new_state = tx.update(g, state, w)
                new_w = optax.apply_updates(w, updates)
            new_params.append(new_w)
            new_states.append(new_state)
        new_model = {"layers": new_params[:-1], "others": new_params[-1]}
        return new_model, new_states, clip_state

    def step(state, scale, model_state, batch, key):
        def scaled_loss(model):
            loss, results = loss_fn(model, model_state, batch, key)
            return loss * scale, (loss, *results)

        grads, (loss, new_model_state, *aux) = jax.grad(scaled_loss, has_aux=True)(state[0])
        finite = True
        if options.loss_scale is not None:
            wide = lambda g: g.astype(jnp.promote_types(g.dtype, "float32"))  # noqa: E731
            grads = jax.tree.map(lambda g: wide(g) / scale, grads)
        if options.loss_scale is not None or options.skip_nonfinite:
            finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        if options.skip_nonfinite:
            finite &= jnp.isfinite(loss)
            loss = jnp.where(finite, loss, jnp.nan)
            new_model_state = where(finite, new_model_state, model_state)
        state = where(finite, update(grads, *state), state)
        if options.loss_scale is not None:
            scale = jnp.where(finite, scale, jnp.maximum(scale / 2, 1))
        return state, scale, new_model_state, loss, *aux, optax.tree.norm(grads)

    return step, clip


def split_model(model):
    """Return the parameters that are updated together: each layer, and all others."""
    return [*model["layers"], model["others"]]


def own_key(key, i):
    """Return the optimizer's key for layer i."""
    return jax.random.fold_in(key, np.uint32(2**32 - 1 - i))


def own_keys(state, i):
    """Replace the keys in the optimizer's state by those of layer i."""
    is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda a: own_key(a, i) if is_key(a) else a, state)


def where(condition, new, old):
    """Select between trees, in the dtypes of the old one."""

    def select(new, old):
        new = new if new.dtype == old.dtype else new.astype(old.dtype)  # keys cannot be cast
        return jnp.where(condition, new, old)

    return jax.tree.map(select, new, old)


def cast(tree, dtype):
    """Cast the floating-point leaves."""
    if dtype is None:
        return tree
    is_float = lambda a: jnp.issubdtype(a.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda a: a.astype(dtype) if is_float(a) else a, tree)


def split_rows(tree, count):
    """Split the rows of all arrays into equal parts."""
    return [jax.tree.map(lambda a, j=j: jnp.split(a, count)[j], tree) for j in range(count)]


def stack(trees):
    return jax.tree.map(lambda *a: jnp.stack(a), *trees)


def unstack(tree, count):
    """Return a list of the layers of a stack."""
    return [jax.tree.map(lambda a, i=i: jnp.asarray(a)[i], tree) for i in range(count)]


def partition(tree, trainable):
    """Return the trained and the frozen parameters, with None in place of the others."""
    if callable(trainable):
        flags = jax.tree_util.tree_map_with_path(trainable, tree)
    else:
        flags = jax.tree.map(
            lambda flag, below: jax.tree.map(lambda _: flag, below), trainable, tree
        )
    return (
        jax.tree.map(lambda flag, a: a if flag else None, flags, tree),
        jax.tree.map(lambda flag, a: None if flag else a, flags, tree),
    )


def merge(trained, frozen):
    is_none = lambda a: a is None  # noqa: E731
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=is_none)
