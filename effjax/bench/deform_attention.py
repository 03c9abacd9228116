"""Deformable attention: effjax's custom call and its XLA form beside a packed gather of plain XLA,
in one process and on as many threads; and what they take on a GPU that need not be there.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

import effjax
from effjax.memory import plan
from effjax.native import available

from ._measure import measure, threads
from ._result import Result, Size, publish, write_record

LEVELS = (100, 134), (50, 67), (25, 34), (13, 17)


class Case(NamedTuple):
    """Four points a level for each head; queries are anywhere, or pixels one after the other."""

    queries: int
    shapes: tuple[tuple[int, int], ...] = LEVELS
    heads: int = 8
    channels: int = 32
    points: int = 4
    batch: int = 1


# A decoder's queries, and an encoder's: as many as the pixels of an image of 800 x 1333.
CASES = Case(300), Case(22_223)
SMALL = Case(300, ((32, 40), (16, 20), (8, 10), (4, 5)))


def make_arrays(case: Case) -> dict[str, np.ndarray]:
    """A value, locations some pixels of each level around a query's own, weights, a cotangent."""
    rng = np.random.default_rng(0)
    n, queries, heads, channels = case.batch, case.queries, case.heads, case.channels
    at = n, queries, heads, len(case.shapes), case.points
    sizes = np.array([(w, h) for h, w in case.shapes])
    own = rng.uniform(size=(n, queries, 1, 1, 1, 2))
    if queries > 1000:  # from the left to the right, row by row
        order = np.lexsort((own[..., 0].ravel(), np.floor(own[..., 1].ravel() * 100)))
        own = own.reshape(-1, 2)[order].reshape(own.shape)
    pixels = own * sizes[:, None] + 2 * rng.normal(size=(*at, 2))
    # Not where rounding decides between which pixels a sample lies: gradients jump there.
    pixels = np.floor(pixels) + np.clip(pixels % 1, 0.001, 0.999)
    values = {
        "value": rng.normal(size=(n, sum(h * w for h, w in case.shapes), heads, channels)),
        "locations": (pixels + 0.5) / sizes[:, None],
        "weights": rng.dirichlet(np.ones(at[3] * at[4]), size=at[:3]).reshape(at),
        "dy": rng.normal(size=(n, queries, heads * channels)),
    }
    return {name: value.astype(np.float32) for name, value in values.items()}


def packed_gather(value, locations, weights, shapes) -> jax.Array:
    """One gather a sample instead of four: beside each pixel lie its three neighbors.

    As the detectors of plain JAX do it: each level is surrounded by zeros and four times as large,
    and image by image and head by head all samples of a level are taken at once.
    """
    n, _, heads, channels = value.shape
    queries, points = locations.shape[1], locations.shape[4]
    parts = jnp.split(value, np.cumsum([h * w for h, w in shapes])[:-1], axis=1)

    def sampled(level, shape, at):  # [H * W, C], [Q * P, 2] -> [Q * P, C]
        h, w = shape
        wide = jnp.pad(level.reshape(h, w, channels), ((1, 1), (1, 1), (0, 0)))
        four = [wide[i : h + 1 + i, j : w + 1 + j] for i in (0, 1) for j in (0, 1)]
        packed = jnp.concatenate(four, -1).reshape((h + 1) * (w + 1), 4 * channels)
        x, y = at[:, 0] * w + 0.5, at[:, 1] * h + 0.5  # in pixels of `wide`
        inside = (x > 0) & (x < w + 1) & (y > 0) & (y < h + 1)
        x, y = jnp.where(inside, x, 0), jnp.where(inside, y, 0)
        column, row = jnp.floor(x), jnp.floor(y)
        right, down = x - column, y - row
        index = row.astype(jnp.int32) * (w + 1) + column.astype(jnp.int32)
        corners = packed[index].reshape(-1, 4, channels)
        shares = jnp.stack(
            [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right], -1
        )
        return jnp.sum(corners * jnp.where(inside[:, None], shares, 0)[..., None], 1)

    def of_head(args):
        locations, weights, *levels = args  # [Q, L, P, 2], [Q, L, P]
        samples = [
            sampled(part, shape, locations[:, i].reshape(-1, 2)).reshape(queries, points, channels)
            for i, (part, shape) in enumerate(zip(levels, shapes, strict=True))
        ]
        samples = jnp.stack(samples, 1)  # [Q, L, P, C]
        return jnp.einsum("qlpc,qlp->qc", samples, weights)

    by_head = [jnp.moveaxis(a, 2, 1) for a in (locations, weights)]
    by_head += [jnp.moveaxis(part, 2, 1) for part in parts]
    y = jax.lax.map(of_head, [a.reshape(n * heads, *a.shape[2:]) for a in by_head])
    y = jnp.moveaxis(y.reshape(n, heads, queries, channels), 1, 2)
    return y.reshape(n, queries, heads * channels)


def forms(case: Case) -> dict[str, Callable]:
    """The operators, of a value, locations and weights."""

    def ours(implementation: Any) -> Callable:
        return lambda value, *others: effjax.ms_deform_attn(
            value, case.shapes, *others, implementation=implementation
        )

    packed = functools.partial(packed_gather, shapes=case.shapes)
    found: dict[str, Callable] = {"packed gather": packed, "effjax xla": ours("xla")}
    if available(jax.default_backend().replace("gpu", "cuda")):
        found["effjax native"] = ours("native")
    return found


def step_of(attn: Callable, backward: bool) -> Callable:
    def step(value, locations, weights, dy):
        if not backward:
            return attn(value, locations, weights)
        y, vjp = jax.vjp(attn, value, locations, weights)
        return y, *vjp(dy)

    return step


def bench_case(case: Case, backward: bool, rounds: int) -> list[dict]:
    """A row a form; "seconds" and "ratio" are those of one run."""
    args = tuple(map(jnp.asarray, make_arrays(case).values()))
    steps = {name: step_of(attn, backward) for name, attn in forms(case).items()}
    return measure(steps, args, reference="packed gather", rounds=rounds)


def plan_case(case: Case, target: str) -> list[dict]:
    """What forward and backward pass take on a GPU, in bytes, by form."""
    shapes = {name: a.shape for name, a in make_arrays(case).items()}
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes.values()]
    rows = []
    for name, attn in forms(case).items():
        if name == "effjax native" and not available("cuda"):
            continue
        found = plan(step_of(attn, True), *args, target=target)
        temporaries = found.device.temporaries
        peak = found.peak_device_bytes
        rows.append({"name": name, "temp_bytes": temporaries, "peak_bytes": peak})
    samples = case.batch * case.queries * case.heads * len(case.shapes) * case.points
    rows.append({"name": "the samples alone", "temp_bytes": samples * case.channels * 4})
    return rows


def bench(case: Case, backward: bool, rounds: int) -> Result:
    """One table."""
    passes = "forward+backward" if backward else "forward"
    config = {"threads": threads(), "rounds": rounds, "passes": passes}
    return Result(
        f"deform_attention_{case.queries}_{passes.replace('+', '_')}",
        f"ms_deform_attn, {case.queries} queries, {passes}",
        case._asdict() | config | {"reference": "packed gather"},
        bench_case(case, backward, rounds),
    )


def results(size: Size) -> Iterator[Result]:
    for case in CASES if size == "published" else (SMALL,):
        for backward in (False, True):
            yield bench(case, backward, rounds=7)


def main(
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 7,
    target: Annotated[
        str, typer.Option(help="Plan for this GPU instead of running, as `effjax memory` does.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Folder for a JSON file a table.")] = None,
) -> None:
    """Times forward, and forward with backward, on the shapes of Deformable DETR."""
    for case in CASES:
        if target:
            rows = plan_case(case, target)
            title = f"ms_deform_attn, {case.queries} queries, forward+backward, {target}"
            for row in rows:
                print(f"{row['name']:20} {row['temp_bytes'] / 2**20:8.1f} MiB")
            if json:
                path = json / f"deform_attention_{case.queries}_{target}.json"
                write_record(path, title, case._asdict() | {"target": target}, rows)
            continue
        for backward in (False, True):
            publish(bench(case, backward, rounds), json)


if __name__ == "__main__":
    typer.run(main)
