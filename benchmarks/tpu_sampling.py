"""Planned memory traffic and memory of the sampling operators on a TPU.

Compares the programs of XLA with the bytes that kernels would move. Nothing runs on a TPU.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import effjax

from . import deform_attention, deform_conv
from .measure import add_gradients, need_compiler, plan_steps
from .results import Bars, Result, Size
from .tpu import NOTE, OURS, PASSES, PLAIN, TARGET, Steps, compare_memory, float32


class Sampler(NamedTuple):
    """An operator that samples an array bilinearly.

    functions: of the arrays and the others, by name. Only the arrays have gradients.
    arrays: the sampled array comes first.
    samples: number of samples, each of four pixels.
    pixel_bytes: bytes of a pixel of one head or group.
    """

    functions: Mapping[str, Callable]
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    samples: int
    pixel_bytes: int
    others: tuple[jax.ShapeDtypeStruct, ...] = ()

    def steps(self, backward: bool) -> Steps:
        """Return the operator in all ways, or the operator and its gradients."""
        result = jax.eval_shape(self.functions[OURS], *self.arrays, *self.others)

        def step(function):
            def run(arrays, others, dy):
                return add_gradients(lambda *arrays: function(*arrays, *others), backward)(
                    *arrays, dy
                )

            return run, self.arrays, self.others, result

        return {name: step(function) for name, function in self.functions.items()}

    def least_bytes(self, backward: bool) -> int:
        """Return the bytes of the arguments and results."""
        result = jax.eval_shape(self.functions[OURS], *self.arrays, *self.others)
        size = count_bytes((self.arrays, self.others, result))
        return size + (count_bytes((self.arrays, result)) if backward else 0)

    def copied_bytes(self, backward: bool) -> int:
        """Return the bytes that a kernel moves if it copies each sampled pixel from HBM.

        In the backward pass it reads and writes the gradient of each pixel, and reads the pixel
        again for the gradients of the other arrays.
        """
        copies = 1 + backward * (2 + (len(self.arrays) > 1))
        pixels = 4 * self.samples * self.pixel_bytes
        return self.least_bytes(backward) - count_bytes(self.arrays[0]) + copies * pixels


def count_bytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def deform_conv_sampler(case: deform_conv.Case) -> Sampler:
    arrays = deform_conv.make_arrays(case)
    functions = {
        PLAIN: deform_conv.make_plain_conv(case),
        OURS: deform_conv.make_effjax_conv(None),
    }
    samples = case.batch * case.height * case.width * case.offset_groups * deform_conv.TAPS
    return Sampler(
        functions,
        tuple(float32(*arrays[name].shape) for name in ("x", "offset", "kernel", "mask")),
        samples,
        4 * case.channels // case.offset_groups,
    )


def deform_attention_sampler(case: deform_attention.Case) -> Sampler:
    arrays = deform_attention.make_arrays(case)
    functions = {
        PLAIN: functools.partial(deform_attention.packed_gather, shapes=case.shapes),
        OURS: deform_attention.effjax_attention(case, None),
    }
    return Sampler(
        functions,
        tuple(float32(*arrays[name].shape) for name in ("value", "locations", "weights")),
        arrays["weights"].size,
        4 * case.channels,
    )


class Boxes(NamedTuple):
    """Shapes of `roi_align` with a fixed number of samples."""

    batch: int
    height: int
    width: int
    channels: int
    boxes: int
    bins: int = 7
    sampling_ratio: int = 2


def plain_roi_align(x: jax.Array, boxes: jax.Array, bins: int, ratio: int) -> jax.Array:
    """Average bilinear samples of x [N, H, W, C] in boxes [N, R, 4], all of them at once."""
    height, width = x.shape[1:3]

    def corners(start, stop, size):
        """Return the two pixels of each sample along an axis, and their weights."""
        step = (stop - start) / (bins * ratio)
        at = start[:, None] + (jnp.arange(bins * ratio) + 0.5) * step[:, None] - 0.5
        inside = (at >= -1) & (at <= size)
        at = jnp.clip(at, 0, size - 1)
        first = jnp.floor(at).astype(jnp.int32)
        weight = at - first
        pixels = first, jnp.minimum(first + 1, size - 1)  # [R, bins * ratio]
        return zip(pixels, (inside * (1 - weight), inside * weight), strict=True)

    def pool(x, boxes):  # [H, W, C], [R, 4]
        left, top, right, bottom = boxes.T
        total = jnp.zeros((), x.dtype)
        for row, row_weight in corners(top, bottom, height):
            for column, column_weight in corners(left, right, width):
                weight = row_weight[:, :, None] * column_weight[:, None]
                total += weight[..., None] * x[row[:, :, None], column[:, None]]
        return total.reshape(-1, bins, ratio, bins, ratio, x.shape[-1]).mean((2, 4))

    return jax.vmap(pool)(x, boxes)


def roi_align_sampler(case: Boxes) -> Sampler:
    bins, ratio = case.bins, case.sampling_ratio
    functions = {
        PLAIN: lambda x, boxes: plain_roi_align(x, boxes, bins, ratio),
        OURS: lambda x, boxes: effjax.roi_align(x, boxes, output_size=bins, sampling_ratio=ratio),
    }
    return Sampler(
        functions,
        (float32(case.batch, case.height, case.width, case.channels),),
        case.batch * case.boxes * (bins * ratio) ** 2,
        4 * case.channels,
        (float32(case.batch, case.boxes, 4),),
    )


def make_samplers(size: Size) -> dict[str, Sampler]:
    if size == "published":
        return {
            "deform_conv2d": deform_conv_sampler(deform_conv.Case(8, 64, 56, 56)),
            "roi_align": roi_align_sampler(Boxes(2, 100, 136, 256, 512)),
            "ms_deform_attn": deform_attention_sampler(deform_attention.Case(22_223)),
        }
    return {
        "deform_conv2d": deform_conv_sampler(deform_conv.Case(2, 32, 16, 16)),
        "roi_align": roi_align_sampler(Boxes(1, 16, 16, 32, 16)),
        "ms_deform_attn": deform_attention_sampler(
            deform_attention.Case(50, ((16, 20), (8, 10)), heads=2)
        ),
    }


def plan_samplers(
    samplers: Mapping[str, Sampler],
    target: str = TARGET,
    all_passes: Sequence[str] = tuple(PASSES),
) -> Iterator[Result]:
    """Plan the bytes of HBM that the samplers read and write, and the memory of the last passes.

    Counts the bytes of two kernels. One that keeps the sampled array in the chip's memory moves
    only arguments and results. The other copies each sampled pixel from HBM.
    """
    rows: list[dict[str, Any]] = []
    memory = {}
    for operator, sampler in samplers.items():
        for passes in all_passes:
            backward = PASSES[passes]
            plans = memory[operator] = plan_steps(sampler.steps(backward), target)
            traffic = {
                "arguments and results": sampler.least_bytes(backward),
                "each sampled pixel copied": sampler.copied_bytes(backward),
                **{name: plan.step_time.memory_bytes for name, plan in plans.items()},
            }
            rows += [
                {"name": name, "of": operator, "passes": passes, "traffic_bytes": count}
                for name, count in traffic.items()
            ]
    yield Result(
        f"tpu_traffic_{target}",
        f"bytes that the samplers read and write in HBM, planned for {target}",
        {"target": target, "pixels": {name: 4 * s.samples for name, s in samplers.items()}},
        rows,
        Bars("traffic_bytes", "read and written in HBM [MB]", ("of", "passes"), log=True, unit=1e6),
        ["Without padding.", NOTE],
    )
    yield compare_memory("tpu_sampling", memory, target)


def run(size: Size) -> Iterator[Result]:
    need_compiler(TARGET)
    yield from plan_samplers(make_samplers(size))
