"""Draws what `effjax.bench.memory` has planned: memory of a training step against depth.

`python -m effjax.bench.figure` reads docs/measured/planned and writes the picture of the README.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ._plot import GRID, LABEL_GAP, TEXT, save

RECOMPUTE_MORE = "jax.checkpoint pass-through, recompute conv1"
# Name in the JSON: what the picture calls it, color, line width.
FORMS = {
    "plain autodiff": ("plain", "#e5534b", 1.8),
    "jax.checkpoint a layer": ("jax.checkpoint a layer", "#e0823d", 1.8),
    "jax.checkpoint pass-through": ("jax.checkpoint, pass-through", "#c69026", 1.8),
    'effjax save="conv"': ('effjax, save="conv"', "#539bf5", 2.6),
    RECOMPUTE_MORE: ("jax.checkpoint, recomputing most", "#a8842c", 1.8),
    'effjax save="features"': ('effjax, save="features"', "#2da46e", 2.6),
}


def read(folder: Path, target: str) -> dict[str, dict[int, float]]:
    """Peak GB by form and depth, of the files memory_block_DEPTH_TARGET.json."""
    peaks: dict[str, dict[int, float]] = {name: {} for name in FORMS}
    for path in folder.glob(f"memory_block_*_{target}.json"):
        depth = int(path.stem.split("_")[2])
        for row in json.loads(path.read_text())["rows"]:
            if row["name"] in peaks:
                peaks[row["name"]][depth] = row["peak_bytes"] / 1e9
    if not all(peaks.values()):
        raise typer.BadParameter(
            f"{folder} has no memory_block_*_{target}.json: run "
            f"python -m effjax.bench.memory --target {target} --json {folder}"
        )
    return {name: dict(sorted(found.items())) for name, found in peaks.items()}


def draw(peaks: dict[str, dict[int, float]], title: str) -> Any:
    """A matplotlib figure; every line has its name and its last value beside its end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    ax = figure.subplots(subplot_kw={"facecolor": "none"})
    depths = sorted({depth for found in peaks.values() for depth in found})
    top = 1.05 * max(max(found.values()) for found in peaks.values())
    taken = -1.0
    for name, found in sorted(peaks.items(), key=lambda item: item[1][max(item[1])]):
        label, color, width = FORMS[name]
        ax.plot([*found], [*found.values()], "o-", color=color, lw=width, ms=4)
        last = max(found)
        taken = max(found[last] / top, taken + LABEL_GAP)
        x, y = (1.005, 1.03), (found[last] / top, taken)
        ax.plot(x, y, color=color, lw=0.7, transform=ax.transAxes, clip_on=False)
        ax.text(
            1.04, taken, f"{label}  {found[last]:.2f} GB", color=color, fontsize=9, va="center",
            weight="bold" if "effjax" in label else "normal", transform=ax.transAxes,
        )  # fmt: skip
    ax.set(xlim=(0, depths[-1]), ylim=(0, top), xticks=depths)
    ax.set_xlabel("layers of the block", color=TEXT, fontsize=9)
    ax.set_ylabel("peak memory of a training step [GB]", color=TEXT, fontsize=9)
    ax.set_title(title, color=TEXT, fontsize=9, loc="left")
    ax.tick_params(colors=TEXT, labelsize=9)
    ax.grid(color=GRID, lw=0.6)
    for side, spine in ax.spines.items():
        spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure


def main(
    folder: Annotated[Path, typer.Argument(help="Of the JSON files.")] = Path(
        "docs/measured/planned"
    ),
    picture: Annotated[Path, typer.Argument(help="svg, png or pdf.")] = Path(
        "docs/images/memory_by_depth.svg"
    ),
    target: str = "h200",
) -> None:
    """Draws peak memory against the depth of a dense block."""
    title = f"DenseNet-BC block, growth rate 12, batch 64 of 32×32, planned for {target.upper()}"
    save(draw(read(folder, target), title), picture)
    print(picture)


if __name__ == "__main__":
    typer.run(main)
