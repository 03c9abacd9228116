"""What the steps exchange between the devices, and what each of it is for."""

from typing import Any

import jax
import pytest

from effjax import OffloadState
from effjax.memory import Collective, collectives
from tests.distributed.cases import (
    CASES,
    CHANNELS,
    DEVICES,
    OPERATORS,
    WAYS,
    data_mesh,
    own_rows,
)

NORMALIZED = {"batch_norm": CHANNELS, "dense_block": CHANNELS + 2 + 2 * 4}  # channels


def exchanged(name: str, way: str) -> tuple[tuple[Collective, ...], Any]:
    """The collectives of a step, and the state."""
    mesh = data_mesh()
    step, state, batches = CASES[name](way, mesh)
    args = state, own_rows(batches[0], way, mesh)
    lowered = step.lower(*args) if way == "pmap" else step.trace(*args).lower()
    return collectives(lowered.compile().as_text()), state


def size(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def bytes_of(found: tuple[Collective, ...], *kinds: str) -> int:
    return sum(one.bytes * one.count for one in found if one.kind in kinds)


def check(name: str, way: str) -> None:
    found, state = exchanged(name, way)
    offloaded = isinstance(state, OffloadState)
    layers, trained = (state.layers, state[:2]) if offloaded else ((), state)
    split = [a for a in jax.tree.leaves(layers) if not a.is_fully_replicated]
    channels = size(state.model_state) // 8 if offloaded else NORMALIZED.get(name, 0)

    assert {one.kind for one in found} <= {"all-reduce", "all-gather", "reduce-scatter"}
    # The parts of a layer that is split, at most once in each pass. Nothing else is gathered.
    assert size(split) <= bytes_of(found, "all-gather") <= 2 * size(split)
    # Each gradient once, the loss (in pmap its gradient too), and what norms need: forward two
    # numbers a channel of each device, or their sums, and backward two sums.
    summed = bytes_of(found, "all-reduce", "reduce-scatter")
    least = size(trained) + 4
    assert least <= summed <= least + 4 + 4 * channels * (2 * DEVICES + 4)


@pytest.mark.covering
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name, way):
    check(name, way)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_network(way):
    check("network", way)
