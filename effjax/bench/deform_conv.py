"""Deformable convolution: effjax's custom call beside its own XLA path, plain XLA, the matrix
products that all of them share, and torchvision's operator where that is importable (`pip install
torch torchvision`, whose CUDA builds run on a CPU too), in one process and on as many threads.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

import effjax
from effjax.native import available
from effjax.ops.deform_conv.reference import Geometry, columns

from . import _torch
from ._measure import measure, threads
from ._result import Result, Size, publish


class Case(NamedTuple):
    """3x3, stride 1, padding 1, as many channels out as in, with masks."""

    batch: int
    channels: int
    height: int
    width: int
    offset_groups: int = 1


CASES = (
    Case(2, 64, 56, 56),
    Case(2, 256, 25, 42),
    Case(2, 128, 50, 84),
    Case(2, 128, 50, 84, offset_groups=4),
    Case(8, 64, 56, 56),
)
SMALL = Case(2, 64, 28, 28), Case(2, 32, 28, 28, offset_groups=4)
ODD_BATCHES = (Case(32, 64, 28, 28), Case(37, 64, 28, 28))


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """Images, offsets of two pixels, masks, a kernel, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    n, c, h, w, groups = case
    values = {
        "x": rng.normal(size=(n, h, w, c)),
        "offset": 2 * rng.normal(size=(n, h, w, groups * 18)),
        "kernel": 0.05 * rng.normal(size=(3, 3, c, c)),
        "mask": rng.uniform(size=(n, h, w, groups * 9)),
        "dy": rng.normal(size=(n, h, w, c)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def jax_step(implementation: Any, backward: bool) -> Callable:
    """The convolution, or its gradients with respect to all four operands."""

    def conv(x, offset, kernel, mask):
        return effjax.deform_conv2d(
            x, offset, kernel, mask, padding=1, implementation=implementation
        )

    return step_of(conv, backward)


def step_of(conv: Callable, backward: bool) -> Callable:
    def step(x, offset, kernel, mask, dy):
        if not backward:
            return conv(x, offset, kernel, mask)
        y, vjp = jax.vjp(conv, x, offset, kernel, mask)
        return y, *vjp(dy)

    return step


def plain_step(case: Case, backward: bool) -> Callable:
    """As one would write it: all samples at once, gradients by automatic differentiation."""
    geometry = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), case.offset_groups)

    def conv(x, offset, kernel, mask):
        samples = columns(x, offset, mask, jnp.zeros(1, jnp.int32), geometry)
        return samples @ kernel.reshape(-1, case.channels)

    return step_of(conv, backward)


def products_alone(case: Case, backward: bool, args: tuple) -> Callable[[], Any]:
    """The matrix products, in slices as large as those of native code; the samples are there."""
    n, channels, height, width, _ = case
    taps = 9 * channels
    most = 24 * 2**20 // (12 if backward else 4) // (n * width * taps)
    count = height // max((r for r in range(1, most + 1) if height % r == 0), default=1)

    def step(samples, kernel, dy):
        wide, parts = kernel.reshape(taps, channels), dy.reshape(count, -1, channels)

        def body(i, carry):
            y, dkernel, dsamples = carry
            here, y = lax.optimization_barrier((samples, y))  # to be multiplied in each turn anew
            y = y.at[i].set(here @ wide)
            if backward:
                dkernel += jnp.einsum("po,pc->oc", parts[i], here)
                dsamples = jnp.einsum("po,co->pc", parts[i], wide)
            return y, dkernel, dsamples

        gradients = (jnp.zeros((channels, taps)), jnp.zeros_like(samples)) if backward else ((), ())
        return lax.fori_loop(0, count, body, (jnp.zeros_like(parts), *gradients))

    _, _, kernel, _, dy = args
    samples = jnp.zeros((dy.size // channels // count, taps))
    run = jax.jit(step).lower(samples, kernel, dy).compile()
    return lambda: run(samples, kernel, dy)


def torch_step(arrays: dict[str, np.ndarray], backward: bool) -> Callable[[], Any]:
    """The same by torchvision, in its own layout; its results in ours."""
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.ops import deform_conv2d  # pyright: ignore[reportMissingImports]

    nchw = lambda a: torch.tensor(a.transpose(0, 3, 1, 2)).contiguous()  # noqa: E731
    nhwc = lambda t: t.detach().permute(0, 2, 3, 1).numpy()  # noqa: E731
    x, offset, mask, dy = (nchw(arrays[name]) for name in ("x", "offset", "mask", "dy"))
    kernel = torch.tensor(arrays["kernel"].transpose(3, 2, 0, 1)).contiguous()
    operands = (x, offset, kernel, mask)

    def run():
        if not backward:
            with torch.no_grad():
                return nhwc(deform_conv2d(x, offset, kernel, padding=1, mask=mask))
        for operand in operands:
            operand.requires_grad_(True).grad = None
        y = deform_conv2d(x, offset, kernel, padding=1, mask=mask)
        y.backward(dy)
        dkernel = kernel.grad.permute(2, 3, 1, 0).numpy()
        return nhwc(y), nhwc(x.grad), nhwc(offset.grad), dkernel, nhwc(mask.grad)

    return run


def reference() -> str:
    """What the others are compared with."""
    return "torchvision" if _torch.find("torchvision")[0] else "plain XLA"


def bench_case(case: Case, backward: bool, rounds: int) -> list[dict]:
    """A row an implementation; "seconds" and "ratio" are those of one run."""
    arrays = make_arrays(case)
    steps = {"plain XLA": plain_step(case, backward), "effjax xla": jax_step("xla", backward)}
    if available(jax.default_backend().replace("gpu", "cuda")):
        steps["effjax native"] = jax_step("native", backward)
    foreign = {}
    if reference() == "torchvision":
        foreign["torchvision"] = torch_step(arrays, backward)
    args = tuple(jnp.asarray(arrays[name]) for name in ("x", "offset", "kernel", "mask", "dy"))
    parts = {"matrix products alone": products_alone(case, backward, args)}
    return measure(steps, args, reference=reference(), rounds=rounds, foreign=foreign, parts=parts)


def bench(case: Case, backward: bool, rounds: int) -> Result:
    """One table."""
    rows = bench_case(case, backward, rounds)
    passes = "forward+backward" if backward else "forward"
    n, c, h, w, groups = case
    found, why = _torch.find("torchvision")
    config = {"passes": passes, "threads": threads(), "rounds": rounds}
    return Result(
        f"deform_conv_{n}x{h}x{w}x{c}_{groups}_{passes.replace('+', '_')}",
        f"deform_conv2d, {n}x{h}x{w}x{c}, offset groups {groups}, {passes}",
        case._asdict() | config | {"reference": reference()},
        rows,
        notes=[] if found else [f"Without torchvision: {why}."],
    )


def results(size: Size) -> Iterator[Result]:
    for case in (*CASES, *ODD_BATCHES) if size == "published" else SMALL:
        for backward in (False, True):
            yield bench(case, backward, rounds=5)


def main(
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 5,
    odd: Annotated[bool, typer.Option(help="Only batches of 32 and 37 images.")] = False,
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Times forward, and forward with backward, on the shapes of detection networks."""
    for case in ODD_BATCHES if odd else CASES:
        for backward in (False, True):
            publish(bench(case, backward, rounds), json)


if __name__ == "__main__":
    typer.run(main)
