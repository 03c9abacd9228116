"""Deformable convolution: effjax's implementations, plain XLA and torchvision.

The matrix products that all of them contain are also timed alone. torchvision runs if it is
installed, with as many threads as XLA.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import effjax
from effjax.ops.samplers.deform_conv.api import CPU_CHUNK_BYTES
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
        # A large batch that is a power of two, and one that is prime.
        Case(32, 64, 28, 28),
        Case(37, 64, 28, 28),
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


def make_matrix_products(case: Case, backward: bool, kernel: Any, dy: Any) -> Callable[[], Any]:
    """Return the matrix products alone, in chunks of about as many rows as in native code.

    All chunks multiply the same samples, which are zeros: only the time is of interest.
    """
    n, channels, height, width, _ = case
    columns_size = TAPS * channels
    # As in deform_conv2d on a CPU: each sampled float32 takes 4 bytes of a chunk in the forward
    # pass and 12 in the backward pass. The number of rows is rounded down to a divisor of the
    # height.
    sample_bytes = 12 if backward else 4
    max_rows = CPU_CHUNK_BYTES["native"] // sample_bytes // (n * width * columns_size)
    num_chunks = height // max((r for r in range(1, max_rows + 1) if height % r == 0), default=1)

    def step(samples, kernel, dy):
        matrix, dy = kernel.reshape(columns_size, channels), dy.reshape(num_chunks, -1, channels)

        def body(i, carry):
            y, dkernel, dsamples = carry
            # Without the barrier XLA would move the product out of the loop.
            current, y = lax.optimization_barrier((samples, y))
            y = y.at[i].set(current @ matrix)
            if backward:
                dkernel += jnp.einsum("po,pc->oc", dy[i], current)
                dsamples = jnp.einsum("po,co->pc", dy[i], matrix)
            return y, dkernel, dsamples

        gradients = (
            (jnp.zeros((channels, columns_size)), jnp.zeros_like(samples)) if backward else ((), ())
        )
        return lax.fori_loop(0, num_chunks, body, (jnp.zeros_like(dy), *gradients))

    samples = jnp.zeros((dy.size // channels // num_chunks, columns_size))
    compiled = jax.jit(step).lower(samples, kernel, dy).compile()
    return lambda: compiled(samples, kernel, dy)


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
        fragments={"matrix products alone": make_matrix_products(case, backward, args[2], args[4])},
        notes=[missing],
    )


def run(size: Size) -> Iterator[Result]:
    for case in CASES[size]:
        for backward in (False, True):
            yield measure_case(case, backward, ROUNDS[size])
