"""Modelled time of the sampling operators on a GPU: effjax's CUDA kernels and plain XLA.

The cases are those that the subjects of the operators time on a CPU. Nothing runs on a GPU.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from effjax.native import is_available, status

from . import deform_attention, deform_conv, roi
from .measure import add_gradients, need_compiler, plan_steps
from .results import Result, Size, UnavailableError

TARGET = "h100"
NOTE = (
    "Modelled, not measured: a kernel takes the time of its FLOPs or of its bytes, whichever is "
    "longer. Sampled arrays count once, and numbers that are added to an array one by one count as "
    "written; instructions, caches and collisions of such additions are not modelled."
)
Steps = dict[str, tuple[Callable, ...]]


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def conv_steps(case: deform_conv.Case, backward: bool) -> Steps:
    arrays = shapes_of(deform_conv.make_arrays(case))
    args = [arrays[name] for name in ("x", "offset", "kernel", "mask", "dy")]
    convs = {
        "plain XLA": deform_conv.make_plain_conv(case),
        "effjax xla": deform_conv.make_effjax_conv("xla"),
        "effjax native": deform_conv.make_effjax_conv("native"),
    }
    return {name: (add_gradients(conv, backward), *args) for name, conv in convs.items()}


def attention_steps(case: deform_attention.Case, backward: bool) -> Steps:
    args = shapes_of(list(deform_attention.make_arrays(case).values()))
    attentions = deform_attention.implementations(case, native=True)
    return {name: (add_gradients(fn, backward), *args) for name, fn in attentions.items()}


def roi_steps(case: roi.Case, backward: bool) -> Steps:
    args = shapes_of(roi.make_arrays(case))
    return {
        f"effjax {name}": (roi.jax_step(case, name, backward), *args) for name in ("xla", "native")
    }


def make_steps(size: Size) -> Mapping[str, Callable[[bool], Steps]]:
    """Return the steps of each case, given whether they have a backward pass."""
    convs = [case for case in deform_conv.CASES[size] if case.batch <= 8]
    steps: dict[str, Callable[[bool], Steps]] = {}
    for conv in convs:
        n, c, h, w, groups = conv
        name = f"deform_conv2d {n}x{h}x{w}x{c}" + (f", {groups} groups" if groups > 1 else "")
        steps[name] = lambda backward, case=conv: conv_steps(case, backward)
    for attention in deform_attention.CASES[size]:
        name = f"ms_deform_attn, {attention.queries} queries"
        steps[name] = lambda backward, case=attention: attention_steps(case, backward)
    pooling = roi.CASES[size][0]  # with a fixed number of samples, whose FLOPs are known
    steps["multiscale_roi_align"] = lambda backward: roi_steps(pooling, backward)
    return steps


def plan_samplers(
    steps: Mapping[str, Callable[[bool], Steps]], target: str = TARGET
) -> Iterator[Result]:
    rows = []
    for operator, make in steps.items():
        for backward in (False, True):
            plans = plan_steps(make(backward), target)
            reference = plans["effjax xla"].step_time.seconds
            for name, plan in plans.items():
                time = plan.step_time
                unknown = dict(time.unknown_kernels)
                rows.append(
                    {
                        "name": name,
                        "of": operator,
                        "passes": "forward+backward" if backward else "forward",
                        "step_seconds": time.seconds,
                        "ratio": round(time.seconds / reference, 3),
                        "traffic_bytes": time.memory_bytes,
                        "temp_bytes": plan.device.temporaries,
                        **({"unknown_kernels": unknown} if unknown else {}),
                    }
                )
    yield Result(
        f"gpu_sampling_{target}",
        f"sampling operators in float32, modelled for {target}",
        {"target": target, "reference": "effjax xla"},
        rows,
        [NOTE],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    if not is_available("cuda"):
        raise UnavailableError(f"the CUDA kernels are {status()['cuda']}")
    yield from plan_samplers(make_steps(size))
