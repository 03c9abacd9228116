"""roi_align over a feature pyramid: effjax's custom call beside its own XLA path, and torchvision's
`MultiScaleRoIAlign` where that is importable (`pip install torch torchvision`, whose CUDA builds
run on a CPU too), in one process that gives each as many threads.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

import effjax
from effjax.native import available

from . import _torch
from ._measure import measure, threads
from ._result import Result, Size, publish


class Case(NamedTuple):
    """7x7 bins of boxes of all sizes, on four levels of strides 4 to 32."""

    sampling_ratio: int
    batch: int = 1
    boxes: int = 512
    channels: int = 256
    height: int = 800
    width: int = 1088


CASES = Case(2), Case(0)  # what detectors take, and one sample a pixel
SMALL = Case(2, boxes=32, channels=32, height=256, width=384)
STRIDES = 4, 8, 16, 32
BINS = 7


def make_arrays(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The levels, boxes of 16 to 800 pixels, and the cotangent of the result."""
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
    """The features of all boxes, or their gradients with respect to all levels."""

    def pool(levels, boxes):
        return effjax.multiscale_roi_align(
            levels, boxes, output_size=BINS, spatial_scales=[1 / s for s in STRIDES],
            sampling_ratio=case.sampling_ratio, implementation=implementation,
        )  # fmt: skip

    def step(levels, boxes, dy):
        if not backward:
            return pool(levels, boxes)
        y, vjp = jax.vjp(lambda levels: pool(levels, boxes), levels)
        return y, *vjp(dy)[0]

    return step


def torch_step(
    case: Case, arrays: tuple[list[np.ndarray], np.ndarray, np.ndarray], backward: bool
) -> Callable[[], Any]:
    """The same by torchvision, in its own layout; its results in ours."""
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.ops import MultiScaleRoIAlign  # pyright: ignore[reportMissingImports]

    levels, boxes, dy = arrays
    nchw = lambda a: torch.tensor(a.transpose(0, 3, 1, 2)).contiguous()  # noqa: E731
    nhwc = lambda t: t.detach().permute(0, 2, 3, 1).numpy()  # noqa: E731
    features = {str(i): nchw(level) for i, level in enumerate(levels)}
    boxes_of_images = [torch.tensor(b) for b in boxes]
    dy_nchw = nchw(dy.reshape(-1, *dy.shape[2:]))
    pool = MultiScaleRoIAlign(list(features), BINS, case.sampling_ratio)
    sizes = [(case.height, case.width)] * case.batch

    def run():
        if not backward:
            with torch.no_grad():
                return nhwc(pool(features, boxes_of_images, sizes)).reshape(dy.shape)
        for level in features.values():
            level.requires_grad_(True).grad = None
        y = pool(features, boxes_of_images, sizes)
        y.backward(dy_nchw)
        return nhwc(y).reshape(dy.shape), *(nhwc(level.grad) for level in features.values())

    return run


def bench_case(case: Case, backward: bool, rounds: int, xla: bool = True) -> list[dict]:
    """A row an implementation; "seconds" and "ratio" are those of one run."""
    arrays = make_arrays(case)
    steps = {"effjax xla": jax_step(case, "xla", backward)} if xla else {}
    if available(jax.default_backend().replace("gpu", "cuda")):
        steps["effjax native"] = jax_step(case, "native", backward)
    foreign = {}
    if _torch.find("torchvision")[0]:
        foreign["torchvision"] = torch_step(case, arrays, backward)
    args = jax.tree.map(jnp.asarray, arrays)
    reference = next(iter(foreign or steps))
    return measure(steps, args, reference=reference, rounds=rounds, foreign=foreign)


def bench(case: Case, backward: bool, rounds: int, xla: bool = True) -> Result:
    """One table."""
    rows = bench_case(case, backward, rounds, xla)
    passes = "forward+backward" if backward else "forward"
    found, why = _torch.find("torchvision")
    reference = "torchvision" if found else rows[0]["name"]
    config = {"passes": passes, "threads": threads(), "rounds": rounds, "reference": reference}
    sampling = f"sampling ratio {case.sampling_ratio}"
    return Result(
        f"roi_align_{case.sampling_ratio}_{threads()}_{passes.replace('+', '_')}",
        f"roi_align, {case.boxes} boxes, {case.channels} channels, {sampling}, {passes}",
        case._asdict() | config,
        rows,
        notes=[] if found else [f"Without torchvision: {why}."],
    )


def results(size: Size) -> Iterator[Result]:
    for case in CASES if size == "published" else (SMALL,):
        for backward in (False, True):
            yield bench(case, backward, rounds=5)


def main(
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    xla: Annotated[bool, typer.Option(help="Also XLA's own path, which takes longest.")] = True,
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Times forward, and forward with backward, at the size of a detector's head."""
    for case in CASES:
        for backward in (False, True):
            publish(bench(case, backward, rounds, xla), json)


if __name__ == "__main__":
    typer.run(main)
