"""The picture of a table: bars of ratios with their spread, or growth by depth."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._measure import exponent
from ._result import Bars, Curves, Result, is_ours

# Greys that can be read on white and on black.
TEXT, GRID = "#808890", "#80889040"
OURS = ("#2da46e", "#539bf5", "#986ee2", "#39c5cf")
SPREAD = "#c0392b"
OTHERS = ("#e5534b", "#e0823d", "#c69026", "#a8842c", "#c96198", "#8d6e63", "#768390")
LABEL_GAP = 0.052  # between labels, of the axis


def save(figure: Any, path: Path) -> None:
    """svg, png or pdf, by its ending."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without dates or random names: the same numbers give the same file. Text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "effjax", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata, dpi=150)


def draw(result: Result) -> Any:
    """A matplotlib figure, or None where no row has what is to be drawn."""
    plot = result.plot
    if isinstance(plot, Bars):
        return draw_bars(result, plot)
    return draw_curves(result, plot) if isinstance(plot, Curves) else None


def draw_bars(result: Result, plot: Bars) -> Any:
    """From the top down in the order of the rows, the value at the end of each bar."""
    rows = [row for row in result.rows if row.get(plot.key) is not None]
    if not rows:
        return None
    figure, ax = _figure(result.title, 1.1 + 0.27 * len(rows))
    top = 0.0
    for i, row in enumerate(rows):
        value = row[plot.key]
        low, high = row.get(f"{plot.key}_quartiles") or (value, value)
        top = max(top, value, high)
        color = OURS[0] if is_ours(result, row["name"]) else TEXT
        ax.barh(i, value, color=color, alpha=0.85, height=0.7)
        if high > low:
            ax.plot((low, high), (i, i), "|-", color=SPREAD, lw=1.4, ms=6)
        ax.annotate(
            f"{value:.1e}" if plot.log else f"{value:.3g}", (max(value, high), i), (4, 0),
            textcoords="offset points", va="center", color=TEXT, fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(rows)), [_label(row, plot.groups) for row in rows], fontsize=9)
    ax.invert_yaxis()
    ax.grid(axis="x", color=GRID, lw=0.6)
    if plot.log and all(row[plot.key] > 0 for row in rows):
        ax.set_xscale("log")
        ax.margins(x=0.15)
    elif top > 0:
        ax.set_xlim(0, 1.13 * top)
    if plot.key == "ratio":
        ax.axvline(1, color=TEXT, lw=0.8, ls=":")
    ax.set_xlabel(plot.label, color=TEXT, fontsize=9)
    return figure


def _label(row: dict, groups: Sequence[str]) -> str:
    words = (
        str(row[key]) if isinstance(row[key], str) else f"{key.replace('_', ' ')} {row[key]:g}"
        for key in groups
    )
    return ", ".join([row["name"], *words])


def draw_curves(result: Result, plot: Curves) -> Any:
    """Every line has its name, its last value and the exponent of its growth beside its end."""
    from matplotlib import ticker

    lines: dict[str, dict[float, float]] = {}
    for row in result.rows:
        if row.get(plot.y) is not None:
            lines.setdefault(row["name"], {})[row[plot.x]] = row[plot.y] / plot.unit
    if not lines:
        return None
    figure, ax = _figure(result.title, 4.2)
    ax.set(xscale="log", yscale="log")
    ours, others = itertools.cycle(OURS), itertools.cycle(OTHERS)
    ends = []
    for name, found in lines.items():
        mine = is_ours(result, name)
        color = next(ours if mine else others)
        x, y = [*found], [*found.values()]
        ax.plot(x, y, "o-", color=color, lw=2.4 if mine else 1.6, ms=4)
        power = f"  ∝ {plot.x}^{exponent(x, y):.2f}" if len(x) > 1 else ""
        last = f"{y[-1]:.0f}" if y[-1] >= 100 else f"{y[-1]:.3g}"
        ends.append((x[-1], y[-1], f"{name}  {last}{power}", color, mine))
    marks = sorted({x for found in lines.values() for x in found})
    ax.set_xticks(marks, [f"{x:g}" for x in marks])
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel(plot.x, color=TEXT, fontsize=9)
    ax.set_ylabel(plot.label, color=TEXT, fontsize=9)
    ax.grid(color=GRID, lw=0.6)
    _name_ends(ax, ends)
    return figure


def _name_ends(ax: Any, ends: Sequence[tuple[float, float, str, str, bool]]) -> None:
    """Names on the right of the axes, pushed apart where lines end close together."""
    ax.figure.draw_without_rendering()  # the limits of the axes are known after it
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = sorted((to_axes.transform((x, y))[1], *rest) for x, y, *rest in ends)
    taken = -1.0
    for i, (height, name, color, mine) in enumerate(heights):
        highest = 1 - LABEL_GAP * (len(heights) - 1 - i)  # room for those above
        taken = max(min(height, highest), taken + LABEL_GAP)
        ax.plot(
            (1.005, 1.03), (height, taken), color=color, lw=0.7, transform=ax.transAxes,
            clip_on=False, scalex=False, scaley=False,
        )  # fmt: skip
        ax.text(
            1.04, taken, name, color=color, fontsize=9, va="center", transform=ax.transAxes,
            weight="bold" if mine else "normal",
        )  # fmt: skip


def _figure(title: str, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    ax = figure.subplots(subplot_kw={"facecolor": "none"})
    ax.set_title(title, color=TEXT, fontsize=9, loc="left", wrap=True)
    ax.tick_params(colors=TEXT, labelsize=9)
    for side, spine in ax.spines.items():
        spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure, ax
