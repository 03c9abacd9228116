"""Deformable attention: effjax's native and XLA implementations and a packed gather in plain XLA.

Times them on this machine, and plans their memory for a GPU.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effjax
from effjax.native import is_available

from .measure import (
    TARGET,
    add_gradients,
    has_native_kernels,
    need_compiler,
    plan_steps,
    time_steps,
)
from .results import Result, Size

REFERENCE = "packed gather"
ROUNDS = 7


class Case(NamedTuple):
    """Shapes of one call; `shapes` holds the height and width of each level."""

    queries: int
    shapes: tuple[tuple[int, int], ...] = ((100, 134), (50, 67), (25, 34), (13, 17))
    heads: int = 8
    channels: int = 32
    points: int = 4
    batch: int = 1


CASES: dict[Size, tuple[Case, ...]] = {
    "small": (Case(300, ((32, 40), (16, 20), (8, 10), (4, 5))),),
    # The queries of a decoder, and of an encoder: one per pixel of an image of 800 x 1333.
    "published": (Case(300), Case(22_223)),
}


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """Return a value, sampling locations around each query, weights and the cotangent."""
    rng = np.random.default_rng(0)
    n, queries, heads, channels = case.batch, case.queries, case.heads, case.channels
    leading = n, queries, heads, len(case.shapes), case.points
    sizes = np.array([(w, h) for h, w in case.shapes])
    center = rng.uniform(size=(n, queries, 1, 1, 1, 2))
    if queries > 1000:  # the queries of an encoder are pixels in order, row by row
        order = np.lexsort((center[..., 0].ravel(), np.floor(center[..., 1].ravel() * 100)))
        center = center.reshape(-1, 2)[order].reshape(center.shape)
    pixels = center * sizes[:, None] + 2 * rng.normal(size=(*leading, 2))
    # Gradients jump where a sample lies on a pixel, and rounding decides which side is taken.
    pixels = np.floor(pixels) + np.clip(pixels % 1, 0.001, 0.999)
    points = len(case.shapes) * case.points
    weights = rng.dirichlet(np.ones(points), size=(n, queries, heads)).reshape(leading)
    values = {
        "value": rng.normal(size=(n, sum(h * w for h, w in case.shapes), heads, channels)),
        "locations": (pixels + 0.5) / sizes[:, None],
        "weights": weights,
        "dy": rng.normal(size=(n, queries, heads * channels)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def packed_gather(value, locations, weights, shapes) -> jax.Array:
    """Sample with one gather instead of four, from pixels stored with their three neighbors.

    This is how detectors in plain JAX do it. Each level is padded with zeros and four times as
    large. All samples of a level are taken at once, image by image and head by head.
    """
    n, _, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    levels = jnp.split(value, np.cumsum([h * w for h, w in shapes])[:-1], axis=1)

    def sample(level, shape, xy):  # [H * W, C], [Q * P, 2] -> [Q * P, C]
        h, w = shape
        padded = jnp.pad(level.reshape(h, w, channels), ((1, 1), (1, 1), (0, 0)))
        corners = [padded[i : h + 1 + i, j : w + 1 + j] for i in (0, 1) for j in (0, 1)]
        packed = jnp.concatenate(corners, -1).reshape((h + 1) * (w + 1), 4 * channels)
        x, y = xy[:, 0] * w + 0.5, xy[:, 1] * h + 0.5  # pixels of `padded`
        inside = (x > 0) & (x < w + 1) & (y > 0) & (y < h + 1)
        x, y = jnp.where(inside, x, 0), jnp.where(inside, y, 0)
        column, row = jnp.floor(x), jnp.floor(y)
        right, down = x - column, y - row
        index = row.astype(jnp.int32) * (w + 1) + column.astype(jnp.int32)
        values = packed[index].reshape(-1, 4, channels)
        bilinear = jnp.stack(
            [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right], -1
        )
        return jnp.sum(values * jnp.where(inside[:, None], bilinear, 0)[..., None], 1)

    def attend(head):
        locations, weights, *levels = head  # [Q, L, P, 2], [Q, L, P]
        samples = [
            sample(level, shape, locations[:, i].reshape(-1, 2)).reshape(queries, points, channels)
            for i, (level, shape) in enumerate(zip(levels, shapes, strict=True))
        ]
        return jnp.einsum("qlpc,qlp->qc", jnp.stack(samples, 1), weights)

    by_head = [jnp.moveaxis(a, 2, 1) for a in (locations, weights, *levels)]
    y = jax.lax.map(attend, [a.reshape(n * heads, *a.shape[2:]) for a in by_head])
    y = jnp.moveaxis(y.reshape(n, heads, queries, channels), 1, 2)
    return y.reshape(n, queries, heads * channels)


def effjax_attention(case: Case, implementation: Any) -> Callable:
    return lambda value, *others: effjax.ms_deform_attn(
        value, case.shapes, *others, implementation=implementation
    )


def implementations(case: Case, native: bool) -> dict[str, Callable]:
    """Return functions of a value, locations and weights by name."""
    attentions: dict[str, Callable] = {
        REFERENCE: functools.partial(packed_gather, shapes=case.shapes),
        "effjax xla": effjax_attention(case, "xla"),
    }
    if native:
        attentions["effjax native"] = effjax_attention(case, "native")
    return attentions


def measure_case(case: Case, backward: bool, rounds: int) -> Result:
    passes = "forward+backward" if backward else "forward"
    attentions = implementations(case, has_native_kernels())
    return time_steps(
        f"deform_attention_{case.queries}_{passes.replace('+', '_')}",
        f"ms_deform_attn, {case.queries} queries, {passes}",
        case._asdict() | {"passes": passes},
        {name: add_gradients(attention, backward) for name, attention in attentions.items()},
        tuple(map(jnp.asarray, make_arrays(case).values())),
        reference=REFERENCE,
        rounds=rounds,
    )


def plan_case(case: Case, target: str = TARGET) -> Result:
    """Plan forward and backward pass for a GPU."""
    args = [jax.ShapeDtypeStruct(a.shape, "float32") for a in make_arrays(case).values()]
    steps = {
        name: (add_gradients(attention, True), *args)
        for name, attention in implementations(case, is_available("cuda")).items()
    }
    rows = [
        {"name": name, "temp_bytes": plan.device.temporaries, "peak_bytes": plan.peak_device_bytes}
        for name, plan in plan_steps(steps, target).items()
    ]
    samples = case.batch * case.queries * case.heads * len(case.shapes) * case.points
    rows.append({"name": "the samples alone", "temp_bytes": samples * case.channels * 4})
    return Result(
        f"deform_attention_{case.queries}_{target}",
        f"ms_deform_attn, {case.queries} queries, forward+backward, planned for {target}",
        case._asdict() | {"target": target},
        rows,
    )


def run(size: Size) -> Iterator[Result]:
    for case in CASES[size]:
        for backward in (False, True):
            yield measure_case(case, backward, ROUNDS)
    need_compiler()
    for case in CASES[size]:
        yield plan_case(case)
