"""roi_align over a feature pyramid: effjax's implementations and torchvision's.

torchvision runs if it is installed, with as many threads.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effjax

from . import pytorch
from .measure import has_native_kernels, time_steps
from .results import Result, Size, num_threads

STRIDES = (4, 8, 16, 32)
BINS = 7
ROUNDS = 5


class Case(NamedTuple):
    """Boxes of all sizes on four levels; `sampling_ratio` 0 takes one sample per pixel."""

    sampling_ratio: int
    batch: int = 1
    boxes: int = 512
    channels: int = 256
    height: int = 800
    width: int = 1088


CASES: dict[Size, tuple[Case, ...]] = {
    "small": (Case(2, boxes=32, channels=32, height=256, width=384),),
    "published": (Case(2), Case(0)),
}
Arrays = tuple[list[np.ndarray], np.ndarray, np.ndarray]


def make_arrays(case: Case) -> Arrays:
    """Return the levels, boxes of 16 to 800 pixels, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    n, r, c = case.batch, case.boxes, case.channels
    levels = [
        rng.normal(size=(n, case.height // s, case.width // s, c)).astype(np.float32)
        for s in STRIDES
    ]
    size = np.exp(rng.uniform(np.log(16), np.log(800), size=(n, r, 1)))
    size = size * np.exp(rng.normal(0, 0.3, size=(n, r, 2)))
    limit = np.array([case.width, case.height])
    center = rng.uniform(size=(n, r, 2)) * limit
    boxes = np.concatenate([center - size / 2, center + size / 2], -1)
    boxes = np.clip(boxes, 0, np.tile(limit, 2)).astype(np.float32)
    return levels, boxes, rng.normal(size=(n, r, BINS, BINS, c)).astype(np.float32)


def jax_step(case: Case, implementation: Any, backward: bool) -> Callable:
    """Return a function of the features of all boxes, or also of the levels' gradients."""

    def pool(levels, boxes):
        return effjax.multiscale_roi_align(
            levels,
            boxes,
            output_size=BINS,
            spatial_scales=[1 / s for s in STRIDES],
            sampling_ratio=case.sampling_ratio,
            implementation=implementation,
        )

    def step(levels, boxes, dy):
        if not backward:
            return pool(levels, boxes)
        y, vjp = jax.vjp(lambda levels: pool(levels, boxes), levels)
        return y, *vjp(dy)[0]

    return step


def torch_step(case: Case, arrays: Arrays, backward: bool) -> Callable[[], Any]:
    """Return the same with torchvision, in its own layout, with results in ours."""
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.ops import MultiScaleRoIAlign  # pyright: ignore[reportMissingImports]

    levels, boxes, dy = arrays
    features = {str(i): pytorch.to_nchw(level) for i, level in enumerate(levels)}
    boxes_per_image = [torch.tensor(b) for b in boxes]
    dy_nchw = pytorch.to_nchw(dy.reshape(-1, *dy.shape[2:]))
    pool = MultiScaleRoIAlign(list(features), BINS, case.sampling_ratio)
    sizes = [(case.height, case.width)] * case.batch

    def run():
        if not backward:
            with torch.no_grad():
                return pytorch.to_nhwc(pool(features, boxes_per_image, sizes)).reshape(dy.shape)
        for level in features.values():
            level.requires_grad_(True).grad = None
        y = pool(features, boxes_per_image, sizes)
        y.backward(dy_nchw)
        gradients = (pytorch.to_nhwc(level.grad) for level in features.values())
        return pytorch.to_nhwc(y).reshape(dy.shape), *gradients

    return run


def measure_case(case: Case, backward: bool, rounds: int) -> Result:
    arrays = make_arrays(case)
    steps = {"effjax xla": jax_step(case, "xla", backward)}
    if has_native_kernels():
        steps["effjax native"] = jax_step(case, "native", backward)
    missing = pytorch.missing("torchvision")
    peers = {} if missing else {"torchvision": torch_step(case, arrays, backward)}
    passes = "forward+backward" if backward else "forward"
    return time_steps(
        f"roi_align_{case.sampling_ratio}_{num_threads()}_{passes.replace('+', '_')}",
        f"roi_align, {case.boxes} boxes, {case.channels} channels, sampling ratio "
        f"{case.sampling_ratio}, {passes}",
        case._asdict() | {"passes": passes},
        steps,
        jax.tree.map(jnp.asarray, arrays),
        reference=next(iter(peers or steps)),
        rounds=rounds,
        peers=peers,
        notes=[missing],
    )


def run(size: Size) -> Iterator[Result]:
    for case in CASES[size]:
        for backward in (False, True):
            yield measure_case(case, backward, ROUNDS)
