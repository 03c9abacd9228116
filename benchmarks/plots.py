"""Pictures of tables: bars with quartiles, or growth by depth.

`PALETTE` is the palette of all pictures: those of the benchmarks, of `docs/draw.py`, and of the
notebooks, which repeat the colors that they use.
"""

import collections
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .measure import fit_exponent
from .results import Bars, Curves, Result, is_ours

# Colors that are readable on white and on black.
TEXT, GRID = "#808890", "#80889040"
# One color per method, in every picture.
PALETTE = {
    "plain": "#e5534b",  # automatic differentiation, everything in device memory
    "jax.checkpoint": "#e0823d",  # around each layer
    "jax.checkpoint pass-through": "#c69026",  # around each layer, with the features passed through
    "jax.checkpoint strongest": "#8d6e63",  # the same, recomputing the 1x1 convolutions
    "effjax": "#2da46e",  # also save="features", which keeps least
    "effjax conv": "#539bf5",  # save="conv"
    "effjax offload": "#986ee2",  # layers streamed from host memory
    "state on the host": "#1f8a99",  # moved to the device as a whole
    "Flax": "#c96198",
    "PyTorch": "#768390",
}
# The method of a program, by its name. The first matching pattern counts.
METHODS = (
    (r'effjax (save=")?conv', "effjax conv"),
    (r"efficient=False|^plain|^packed|alone$", "plain"),
    ("effjax|in memory, fused", "effjax"),
    ("^(all|activations) offloaded|^(float32|8-bit) moments", "effjax offload"),
    ("moved whole", "state on the host"),
    ("checkpoint.*recompute", "jax.checkpoint strongest"),
    ("checkpoint.*pass-through", "jax.checkpoint pass-through"),
    ("orch", "PyTorch"),
    ("checkpoint|remat", "jax.checkpoint"),
    ("in memory", "plain"),
    ("Flax", "Flax"),
)
LINE_STYLES = "-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2))  # variants of one method
LABEL_GAP = 0.052  # between labels of one line


def color_of(name: str) -> str:
    """Return the color of a program's method, or gray for a method without a color."""
    found = (PALETTE[method] for pattern, method in METHODS if re.search(pattern, name))
    return next(found, TEXT)


def save(figure: Any, path: Path) -> None:
    """Save a figure; equal data give an equal file."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "effjax", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata, dpi=150)


def draw(result: Result) -> Any:
    """Return a matplotlib figure, or None if no row has the plotted value."""
    if isinstance(result.plot, Bars):
        return draw_bars(result, result.plot)
    return draw_curves(result, result.plot) if isinstance(result.plot, Curves) else None


def draw_bars(result: Result, plot: Bars) -> Any:
    rows = [row for row in result.rows if row.get(plot.key) is not None]
    if not rows:
        return None
    figure, ax = new_figure(result.title, 1.1 + 0.27 * len(rows))
    limit = 0.0
    for i, row in enumerate(rows):
        value, *quartiles = (
            v / plot.unit for v in (row[plot.key], *(row.get(f"{plot.key}_quartiles") or ()))
        )
        low, high = quartiles or (value, value)
        limit = max(limit, value, high)
        highlight, color = is_ours(result, row["name"]), color_of(row["name"])
        # Pale bars, so that lines of the same color show on them.
        ax.barh(i, value, color=color + "90", edgecolor=color, height=0.7)
        if high > low:
            ax.plot((low, high), (i, i), "|-", color=color, lw=1.6, ms=7)
        text = f"{value:.1e}" if plot.log and plot.unit == 1 else f"{value:.3g}"
        weight = "bold" if highlight else "normal"
        style = dict(textcoords="offset points", va="center", color=TEXT, fontsize=8)
        ax.annotate(text, (max(value, high), i), (4, 0), weight=weight, **style)
    ax.set_yticks(range(len(rows)), [_bar_label(row, plot.groups) for row in rows], fontsize=9)
    ax.invert_yaxis()
    ax.grid(axis="x", color=GRID, lw=0.6)
    if plot.log and all(row[plot.key] > 0 for row in rows):
        ax.set_xscale("log")
        if plot.unit != 1:
            ax.xaxis.set_major_formatter("{x:g}")
        ax.margins(x=0.15)
    elif limit > 0:
        ax.set_xlim(0, 1.13 * limit)
    if plot.key == "ratio":
        ax.axvline(1, color=TEXT, lw=0.8, ls=":")
    ax.set_xlabel(plot.label, color=TEXT, fontsize=9)
    return figure


def _bar_label(row: dict, groups: Sequence[str]) -> str:
    words = [row["name"]]
    for key in groups:
        value = row[key]
        words.append(value if isinstance(value, str) else f"{key.replace('_', ' ')} {value:g}")
    return ", ".join(words)


def draw_curves(result: Result, plot: Curves) -> Any:
    """Draw a line per program, labeled with its name, last value and exponent of growth."""
    from matplotlib import ticker

    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
        if row.get(plot.y) is not None:
            lines.setdefault(row["name"], {})[row[plot.x]] = row[plot.y] / plot.unit
    if not lines:
        return None
    figure, ax = new_figure(result.title, 4.2)
    ax.set(xscale="log", yscale="log")
    ends, drawn = [], collections.Counter[str]()
    for name, points in lines.items():
        highlight, color = is_ours(result, name), color_of(name)
        style = LINE_STYLES[drawn[color] % len(LINE_STYLES)]
        drawn[color] += 1
        x, y = list(points), list(points.values())
        ax.plot(x, y, marker="o", ls=style, color=color, lw=2.4 if highlight else 1.6, ms=4)
        power = f"  ∝ {plot.x}^{fit_exponent(x, y):.2f}" if len(x) > 1 else ""
        last = f"{y[-1]:.0f}" if y[-1] >= 100 else f"{y[-1]:.3g}"
        ends.append(((x[-1], y[-1]), f"{name}  {last}{power}", color, highlight))
    ticks = sorted({x for points in lines.values() for x in points})
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel(plot.x, color=TEXT, fontsize=9)
    ax.set_ylabel(plot.label, color=TEXT, fontsize=9)
    ax.grid(color=GRID, lw=0.6)
    label_ends(ax, ends)
    return figure


def label_ends(
    ax: Any, ends: Sequence[tuple[tuple[float, float], str, str, bool]], gap: float = LABEL_GAP
) -> None:
    """Write labels right of the axes, pushed apart where lines end close together.

    Args:
        ax: The axes, with all lines drawn.
        ends: Last point of each line, its label, its color, and whether the label is bold.
        gap: Smallest distance of two labels, as a fraction of the axis.
    """
    ax.figure.draw_without_rendering()  # sets the limits of the axes
    to_axes = ax.transData + ax.transAxes.inverted()
    labels = sorted((to_axes.transform(end)[1], *rest) for end, *rest in ends)
    height = -1.0
    for i, (wanted, text, color, bold) in enumerate(labels):
        highest = 1 - gap * (len(labels) - 1 - i)  # leaves room for the labels above
        height = max(min(wanted, highest), height + gap)
        line = dict(clip_on=False, scalex=False, scaley=False)
        xs, ys = (1.005, 1.03), (wanted, height)
        ax.plot(xs, ys, color=color, lw=0.7, transform=ax.transAxes, **line)
        style = dict(color=color, fontsize=9, va="center", weight="bold" if bold else "normal")
        ax.text(1.04, height, text, transform=ax.transAxes, **style)


def new_figure(title: str, height: float, width: float = 9) -> tuple[Any, Any]:
    """Return a figure and its axes, transparent and without a frame."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots(subplot_kw={"facecolor": "none"})
    ax.set_title(title, color=TEXT, fontsize=9, loc="left", wrap=True, pad=12)
    ax.tick_params(colors=TEXT, labelsize=9)
    for side, spine in ax.spines.items():
        spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure, ax
