"""Deformable convolution: effjax's implementations, plain XLA and torchvision.

torchvision runs if it is
installed, with as many threads as XLA.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import effjax
from effjax.ops.samplers.deform_conv.reference import Geometry, columns

from . import pytorch
from .measure import add_gradients, has_native_kernels, time_steps
from .results import Result, Size


class Case(NamedTuple):
    """Shapes of a 3x3 convolution with masks, stride 1 and padding 1.

    The input and the output are [batch, height, width, channels].
    """

    batch: int
    channels: int
    height: int
    width: int
    offset_groups: int = 1


CASES: dict[Size, tuple[Case, ...]] = {
    "small": (Case(2, 64, 28, 28), Case(2, 32, 28, 28, offset_groups=4)),
    "published": (
        Case(2, 64, 56, 56),
        Case(2, 256, 25, 42),
        Case(2, 128, 50, 84),
        Case(2, 128, 50, 84, offset_groups=4),
        Case(8, 64, 56, 56),
    ),
}
TAPS = 9
ROUNDS: dict[Size, int] = {"small": 5, "published": 15}


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """Return images, offsets of about two pixels, masks, a kernel and the result's cotangent."""
    rng = np.random.default_rng(0)
    n, c, h, w, groups = case
    values = {
        "x": rng.normal(size=(n, h, w, c)),
        "offset": 2 * rng.normal(size=(n, h, w, groups * TAPS * 2)),  # (y, x) of each tap
        "kernel": 0.05 * rng.normal(size=(3, 3, c, c)),
        "mask": rng.uniform(size=(n, h, w, groups * TAPS)),
        "dy": rng.normal(size=(n, h, w, c)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def make_effjax_conv(implementation: Any) -> Callable:
    def conv(x, offset, kernel, mask):
        return effjax.deform_conv2d(
            x, offset, kernel, mask, padding=1, implementation=implementation
        )

    return conv


def make_plain_conv(case: Case) -> Callable:
    """Return the usual program: all samples at once, gradients by automatic differentiation."""
    geometry = Geometry(
        kernel_size=(3, 3),
        strides=(1, 1),
        padding=((1, 1), (1, 1)),
        kernel_dilation=(1, 1),
        offset_groups=case.offset_groups,
    )

    def conv(x, offset, kernel, mask):
        first_row = jnp.zeros(1, jnp.int32)
        samples = columns(x, offset, mask, first_row, geometry)  # [N, H, W, 9 * C]
        return samples @ kernel.reshape(-1, case.channels)

    return conv


def make_torch_step(arrays: dict[str, np.ndarray], backward: bool) -> Callable[[], Any]:
    """Return the same step with torchvision.

    Its arguments are in PyTorch's layout from the start. Its results are in effjax's layout.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.ops import deform_conv2d  # pyright: ignore[reportMissingImports]

    x, offset, mask, dy = (pytorch.to_nchw(arrays[k]) for k in ("x", "offset", "mask", "dy"))
    kernel = torch.tensor(arrays["kernel"].transpose(3, 2, 0, 1)).contiguous()
    operands = (x, offset, kernel, mask)

    def run():
        if not backward:
            with torch.no_grad():
                return pytorch.to_nhwc(deform_conv2d(x, offset, kernel, padding=1, mask=mask))
        for operand in operands:
            operand.requires_grad_(True).grad = None  # PyTorch adds to an earlier gradient
        y = deform_conv2d(x, offset, kernel, padding=1, mask=mask)
        y.backward(dy)
        dkernel = kernel.grad.permute(2, 3, 1, 0).numpy()
        dx, doffset, dmask = (pytorch.to_nhwc(t.grad) for t in (x, offset, mask))
        return pytorch.to_nhwc(y), dx, doffset, dkernel, dmask

    return run


def measure_case(case: Case, backward: bool, rounds: int) -> Result:
    """Time all implementations, relative to torchvision or, without it, to plain XLA."""
    arrays = make_arrays(case)
    convs = {"plain XLA": make_plain_conv(case), "effjax xla": make_effjax_conv("xla")}
    if has_native_kernels():
        convs["effjax native"] = make_effjax_conv("native")
    missing = pytorch.missing("torchvision")
    peers = {} if missing else {"torchvision": make_torch_step(arrays, backward)}
    args = tuple(jnp.asarray(arrays[name]) for name in ("x", "offset", "kernel", "mask", "dy"))
    passes = "forward+backward" if backward else "forward"
    n, c, h, w, groups = case
    return time_steps(
        f"deform_conv_{n}x{h}x{w}x{c}_{groups}_{passes.replace('+', '_')}",
        f"deform_conv2d, {n}x{h}x{w}x{c}, offset groups {groups}, {passes}",
        case._asdict() | {"passes": passes},
        {name: add_gradients(conv, backward) for name, conv in convs.items()},
        args,
        reference=next(iter(peers or convs)),
        rounds=rounds,
        peers=peers,
        notes=[missing],
    )


def run(size: Size) -> Iterator[Result]:
    for case in CASES[size]:
        for backward in (False, True):
            yield measure_case(case, backward, ROUNDS[size])
