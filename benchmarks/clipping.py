"""Modelled time of a layer whose gradients are clipped by the norm of all of them.

An offloaded step updates the layers in a second loop, after the backward pass. A prototype delays
the update instead: the forward pass of the next step loads the gradients and the optimizer's state
with the parameters, and updates each layer before it runs.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import OffloadState, offload_jit, offload_train_step
from effjax.memory import find_rates
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig, decoder_functions, decoder_shapes
from effjax.ops.offload import slices, stack
from effjax.ops.offload.backends import (
    allocate_results,
    barrier,
    load,
    mark_host_slices,
    repeat_turns,
    write,
)
from effjax.ops.offload.embed_head import make_embed_head, run_embed, run_head
from effjax.ops.offload.layers import ForwardPass, LayerStack
from effjax.ops.offload.optimizer import adjust_optimizer, make_clip
from effjax.ops.offload.placement import Space, put
from effjax.ops.offload.row_update import plan_rows, update_params
from effjax.ops.offload.slices import OffloadOptions
from effjax.ops.offload.train_state import StateSpec
from effjax.ops.offload.trees import Partition, Tree, float_leaves, merge_leading_axes
from effjax.train.optimizers import is_adamw

from .language_model_table import (
    CLIP_NORM,
    MACHINES,
    MLP_CHUNK,
    OPTIMIZERS,
    QWEN3_8B,
    Machine,
    plan_cached,
)
from .measure import need_compiler
from .results import Bars, Result, Size

SECOND_LOOP, DELAYED = "updated in a second loop", "updated in the next forward pass"
GPUS = tuple(machine for machine in MACHINES if machine.name in ("H100", "GH200"))


# The prototype: a stack with all parameters in host memory and trained.


class DelayedState(NamedTuple):
    """The state of the prototype: that of a step, and the update that its layers lack."""

    state: OffloadState
    grads: Tree  # [L, ...] of the layers, in host memory
    norm: jax.Array  # [], of all gradients
    exists: jax.Array  # bool []: False before the first step, whose `grads` are not used


def update_and_run(
    layers: LayerStack, layer: Any, params: Partition, state: Tree, grads: Tree, x: Tree
) -> tuple[ForwardPass, Tree]:
    """Update and run each layer; return the forward pass and the state of the optimizer.

    While a layer runs, its new parameters and state leave, and those of the next one arrive with
    its gradients.
    """
    config, params, closure, x = stack.build_stack(layer, params, x, None, OffloadOptions())
    trained, state, grads = stack.split_slices((params.trained, state, grads), config)
    start, count = mark_host_slices(), config.num_slices

    def apply(i, w, x):
        w = Partition(w, params.frozen)
        x, aux, residuals = slices.forward(
            config.slice, w, closure, x, (None, i), save_residuals=True
        )
        return x, (aux, put(residuals, Space.Host))

    def turn(loads, i, carry):
        x, (trained, state), (w, s), results = carry
        # As in the fused backward pass: XLA cannot read and write one array at the same time. So
        # read the next parameters before writing the new ones, and write the new state before
        # reading the next one.
        if loads:
            trained, ahead = barrier((trained, load(trained, i + 1)))
            dw = load(grads, i + 1)
        trained, state = write((trained, state), (w, s), i)
        if loads:
            s = load(state, i + 1)
        w, leaving = barrier((w, stack._copy_input(x, i)))
        x, (aux, _) = apply(i, w, x)
        results = write(results, jax.tree.leaves((aux, put(leaving, Space.Host))), i)
        new = layers.update_slice(ahead, s, dw) if loads else (w, s)
        return x, (trained, state), new, results

    new = layers.update_slice(*load((trained, state, grads), start))
    results, structure = allocate_results(
        count, lambda i, w, x: apply(i, w, x)[1], start, new[0], x
    )
    carry = x, (trained, state), new, results
    carry = repeat_turns(functools.partial(turn, True), carry, start, range(count - 1))
    carry = repeat_turns(functools.partial(turn, False), carry, start, range(count - 1, count))
    x, (trained, state), _, results = carry
    aux, streamed = structure.unflatten(results)
    aux = merge_leading_axes(jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), aux))
    trained, state = merge_leading_axes((trained, state))
    daux = [jnp.zeros_like(a) for a in float_leaves(aux)]
    residuals = stack.StackResiduals(streamed, (), ())
    by_slice = Partition(trained, params.frozen)
    return ForwardPass(x, aux, trained, config, by_slice, closure, None, residuals, daux), state


def make_delayed_step(embed: Any, layer: Any, head: Any, tx: Any, clip_norm: float) -> Any:
    """Return ``step(delayed, batch) -> (delayed, loss)``, with the weighted loss of `head`."""
    embed, head = make_embed_head(embed, head, False, False, True)
    spec = StateSpec(LayerStack(tx), True, True, "host", None, others_in="host")

    def step(delayed: DelayedState, batch: Any) -> tuple[DelayedState, jax.Array]:
        old = delayed.state
        params, others = spec.partition(old.layers, old.others)
        named = spec.with_paths(params.trained, others.trained)
        layers: Any = named.layers
        num_layers = layers.count(old.layers)
        loaded = put(others, Space.Device)
        x, _, embed_vjp = run_embed(embed, 1, loaded, (), batch, None, num_layers)
        clip = make_clip(clip_norm, "global", delayed.norm)
        pending = layers.map_tx(
            lambda tx: adjust_optimizer(tx, delayed.exists, clip, jnp.float32(1))
        )
        done, layers_state = update_and_run(
            pending, layer, params, old.layers_state, delayed.grads, x
        )
        ends = run_head(head, 1, loaded, (), done.y, batch, None, num_layers + 1, None, True)
        grads, stats, dx = layers.backward(done, ends.dy, None)
        others_grads = jax.tree.map(jnp.add, ends.grads, embed_vjp(dx))
        norm = jnp.sqrt(stats.add(others_grads, None).squares)
        clipped = adjust_optimizer(
            named.others_tx, stats.finite, make_clip(clip_norm, "global", norm), None
        )
        plan = plan_rows(named.others_tx, others.trained, is_adamw)
        new_others, others_state = update_params(
            clipped, plan, others.trained, old.others_state, others_grads, num_layers
        )
        new = OffloadState(done.trained, new_others, layers_state, others_state)
        return DelayedState(new, grads, norm, jnp.bool_(True)), ends.loss

    return step


# The plan.


def abstract_step(config: DecoderConfig, length: int, form: str) -> tuple:
    """Return `(fn, *args)` of a step for the planner, AdamW with float32 moments."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, min_axes: int | None = None) -> Any:
        """Put arrays of at least `min_axes` axes into host memory."""

        def one(a):
            offloaded = min_axes is not None and a.ndim >= min_axes
            kind = "pinned_host" if offloaded else "device"
            sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    functions = decoder_functions(config, mlp_chunk_size=MLP_CHUNK if length > MLP_CHUNK else None)
    tx = OPTIMIZERS["float32"]()
    init, step = offload_train_step(
        *functions, tx, clip_norm=CLIP_NORM, fuse_update=False, weighted_loss=True,
        others_in="host", update_rows=is_adamw,
    )  # fmt: skip
    layers, others = decoder_shapes(config)
    state: Any = jax.eval_shape(init, place(layers, 1), place(others, 1))
    state = OffloadState(
        layers=place(state.layers, 1),
        others=place(state.others, 1),
        layers_state=place(state.layers_state, 2),  # counts of the layers are on the device
        others_state=place(state.others_state, 1),
    )
    if form == DELAYED:
        step = make_delayed_step(*functions, tx, CLIP_NORM)
        norm, exists = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), bool)
        state = DelayedState(state, place(layers, 1), place(norm), place(exists))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return offload_jit(step), state, place({"tokens": tokens, "labels": tokens})


def layer_row(machine: Machine, form: str, programs: Sequence[str], counts: Sequence[int]) -> dict:
    """Return what a layer adds to a step, from the programs of two depths."""
    few, many = (step_time(hlo, find_rates(machine.target)) for hlo in programs)

    def per_layer(name: str) -> float:
        return (getattr(many, name) - getattr(few, name)) / (counts[1] - counts[0])

    names = "compute_seconds", "to_device_seconds", "to_host_seconds"
    traffic = "to_device_bytes", "to_host_bytes"
    return {
        "name": f"{form}, {machine.name}",
        "gpu": machine.name,
        "step_seconds": per_layer("seconds"),
        **{name: per_layer(name) for name in (*names, *traffic)},
    }


def make_result(
    config: DecoderConfig,
    length: int,
    counts: Sequence[int],
    programs: Mapping[tuple[Machine, str], Sequence[str]],
) -> Result:
    """Return the table of both forms; `programs` has those of each GPU and form by depth."""
    rows = [layer_row(gpu, form, hlo, counts) for (gpu, form), hlo in programs.items()]
    seconds = {row["name"]: row["step_seconds"] for row in rows}
    for row in rows:
        row["ratio"] = row["step_seconds"] / seconds[f"{SECOND_LOOP}, {row['gpu']}"]
    return Result(
        "clipping",
        "a layer of an offloaded step that clips by the norm of all gradients, modelled",
        {
            "config": config.to_json() | {"num_hidden_layers": list(counts)},
            "tokens": length,
            "compiled_for": [gpu.target for gpu in dict.fromkeys(gpu for gpu, _ in programs)],
            "reference": SECOND_LOOP,
            "ours": [row["name"] for row in rows if row["name"].startswith(SECOND_LOOP)],
        },
        rows,
        Bars("step_seconds", "modelled time of a layer [ms]", unit=1e-3),
    )


def plan_forms(
    config: DecoderConfig,
    length: int,
    counts: Sequence[int],
    gpus: Sequence[Machine] = GPUS,
    cache: Path | None = None,
) -> Result:
    """Plan both forms for each GPU at two depths."""

    def compile_step(gpu: Machine, form: str, count: int) -> str:
        deep = dataclasses.replace(config, num_hidden_layers=count)
        step = abstract_step(deep, length, form)
        return plan_cached(step, gpu.target, gpu.host_bytes, cache).hlo

    programs = {
        (gpu, form): [compile_step(gpu, form, count) for count in counts]
        for gpu in gpus
        for form in (SECOND_LOOP, DELAYED)
    }
    return make_result(config, length, counts, programs)


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    # The head is outside of the loops over layers, so its size does not matter.
    config = dataclasses.replace(QWEN3_8B, vocab_size=16384)
    if size == "published":
        yield plan_forms(config, 32768, (4, 8))
    else:
        small = dataclasses.replace(
            config, hidden_size=256, intermediate_size=512, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        yield plan_forms(small, 1024, (4, 6), GPUS[:1])
