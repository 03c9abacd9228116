"""Collectives of a training step: which ones, and how many bytes."""

import jax

from effjax import OffloadState
from effjax.memory.read.hlo import Collective, collectives
from tests.distributed.cases import CASES, CHANNELS, DEVICES, data_mesh, own_rows
from tests.tiers import vary

NORMALIZED = {"batch_norm": CHANNELS, "dense_block": CHANNELS + 2 + 2 * 4}  # channels


def size(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def bytes_of(moved: tuple[Collective, ...], *kinds: str) -> int:
    return sum(one.bytes * one.count for one in moved if one.kind in kinds)


@vary(
    ("name", "way"),
    [
        ("offload", "jit"),
        ("offload", "pmap"),
        ("batch_norm", "shard_map"),
        ("dense_block", "jit"),
        ("dense_block", "pmap"),
        ("deform_conv", "shard_map"),
        ("network", "jit"),
    ],
)
def test_collectives(name, way):
    mesh = data_mesh(name)
    step, state, batches = CASES[name](way, mesh)
    args = state, own_rows(batches[0], way, mesh)
    lowered = step.lower(*args) if way == "pmap" else step.trace(*args).lower()
    moved = collectives(lowered.compile().as_text())
    offloaded = isinstance(state, OffloadState)
    layers, trained = (state.layers, state[:2]) if offloaded else ((), state)
    split = [a for a in jax.tree.leaves(layers) if not a.is_fully_replicated]
    channels = size(state.model_state) // 8 if offloaded else NORMALIZED.get(name, 0)

    assert {one.kind for one in moved} <= {"all-reduce", "all-gather", "reduce-scatter"}
    # A layer that is split is gathered at most once in each pass. Nothing else is gathered.
    assert size(split) <= bytes_of(moved, "all-gather") <= 2 * size(split)
    # Each gradient is summed once, and so is the loss (in pmap its gradient too). A norm exchanges
    # two numbers per channel and device, or their sums, forward, and two sums backward.
    summed = bytes_of(moved, "all-reduce", "reduce-scatter")
    least = size(trained) + 4
    assert least <= summed <= least + 4 + 4 * channels * (2 * DEVICES + 4)
