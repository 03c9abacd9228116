"""Charts of memory, by Matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Kinds of memory are shades of one color, since other colors stand for methods in all pictures.
_COLORS = {
    "argument": "#155e68", "output": "#2f9aa8", "temporary": "#8cc5cd",
    "constant": "#5b6770", "lost in packing": "#b4bcc4",
}  # fmt: skip
_VISIBLE = 0.01  # of the largest bar


class Bar(NamedTuple):
    """A bar of a chart; its kind of memory determines its color."""

    label: str
    bytes: int
    kind: str


def plot_unit(largest: float) -> tuple[float, str]:
    """Return the unit of an axis whose largest value is given in bytes, and its name."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB") if largest >= 1e6 else (1e3, "kB")


def new_axes() -> Any:
    """Return matplotlib axes of a new figure."""
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(9, 4), layout="constrained")[1]


def bar_chart(bars: Sequence[Bar], ax: Any, xlabel: str, legend: bool = True) -> Any:
    """Draw horizontal bars, largest first, without those too short to see; return the axes.

    The unit is chosen by the largest bar, and appended to `xlabel`.
    """
    from matplotlib.patches import Patch

    ax = ax or new_axes()
    bars = [bar for bar in bars if bar.bytes >= _VISIBLE * bars[0].bytes]
    colors = [_COLORS[bar.kind] for bar in bars]
    unit, unit_name = plot_unit(bars[0].bytes)
    drawn = ax.barh(range(len(bars)), [bar.bytes / unit for bar in bars], color=colors)
    labels = [f"{bar.bytes / unit:.1f} {unit_name}" for bar in bars]
    ax.bar_label(drawn, labels, padding=3, fontsize="small")
    ax.margins(x=0.15)
    ax.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize="small")
    ax.invert_yaxis()
    ax.set_xlabel(f"{xlabel} [{unit_name}]")
    if legend:
        kinds = dict.fromkeys(bar.kind for bar in bars)
        handles = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
        ax.legend(handles=handles, loc="lower right")
    return ax


def stacked_bar_chart(
    sizes: Mapping[str, Mapping[str, int]], ax: Any, xlabel: str, available: int
) -> Any:
    """Draw one bar per name, stacked by kind of memory; return the axes.

    Args:
        sizes: bytes by kind, by name.
        ax: matplotlib axes, or None for a new figure.
        xlabel: the label of the x axis, without its unit.
        available: bytes of memory to mark.
    """
    ax = ax or new_axes()
    unit, unit_name = plot_unit(max(sum(by_kind.values()) for by_kind in sizes.values()))
    left = [0.0] * len(sizes)
    for kind, color in _COLORS.items():
        widths = [by_kind[kind] / unit for by_kind in sizes.values()]
        if any(widths):
            ax.barh(range(len(sizes)), widths, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    # The line would make bars that are far below it too short to read.
    if max(left) > available / unit / 3:
        ax.axvline(available / unit, color="black", linestyle="--", label="available")
    ax.set_yticks(range(len(sizes)), list(sizes))
    ax.invert_yaxis()
    ax.legend()
    ax.set_xlabel(f"{xlabel} [{unit_name}]")
    return ax


def scatter_chart(
    points: Mapping[str, Sequence[tuple[int, int]]], ax: Any, xlabel: str, available: int
) -> Any:
    """Draw `(x, bytes)` points by group, and the available memory; return the axes."""
    ax = ax or new_axes()
    unit, unit_name = plot_unit(available)
    for (label, group), marker in zip(points.items(), ("o", "x"), strict=True):
        if group:
            xs, sizes = zip(*group, strict=True)
            heights = [size / unit for size in sizes]
            ax.plot(xs, heights, marker, color=_COLORS["argument"], label=label)
    ax.axhline(available / unit, color="black", linestyle="--", label="available")
    ax.set(xlabel=xlabel, ylabel=f"device memory at the peak [{unit_name}]", xlim=0, ylim=0)
    ax.legend()
    return ax
