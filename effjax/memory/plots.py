"""How plans look as pictures (matplotlib)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ops._common.arguments import as_integer
from .report import array_name, format_bytes, grouped, parts, short_name, short_path, verdict

if TYPE_CHECKING:
    from .batch_size import MaxBatch
    from .plan import MemoryPlan
    from .residuals import ResidualReport

_COLORS = {
    "argument": "tab:blue", "output": "tab:green", "temporary": "tab:orange",
    "constant": "tab:purple", "lost in packing": "tab:gray",
}  # fmt: skip
_VISIBLE = 0.01  # of the largest bar


def plot_plan(plan: "MemoryPlan", ax: Any, most: int) -> Any:
    """Bars of the largest groups of buffers; those too short to be seen are left out."""
    from matplotlib.patches import Patch

    as_integer("most", most, 1)
    ax, groups = ax or _new_axes(), grouped(plan)
    groups = [g for g in groups[:most] if g.bytes >= _VISIBLE * groups[0].bytes]
    labels = [
        f"{g.count}× {g.shape}  {short_path(g.source) or short_name(g.operation)}" for g in groups
    ]
    kinds = [group.kind for group in groups]
    _bars(ax, labels, [group.bytes for group in groups], [_COLORS[kind] for kind in kinds])
    ax.legend(
        handles=[Patch(color=_COLORS[kind], label=kind) for kind in dict.fromkeys(kinds)],
        loc="lower right",
    )
    ax.set_xlabel("GB in device memory at the peak")
    ax.set_title(verdict(plan).replace("; ", "\n"), fontsize="medium")
    return ax


def plot_residuals(found: "ResidualReport", ax: Any, most: int) -> Any:
    """Bars of the largest arrays that are kept; those too short to be seen are left out."""
    as_integer("most", most, 1)
    ax = ax or _new_axes()
    rows = [row for row in found.largest[:most] if row[-1] >= _VISIBLE * found.largest[0][-1]]
    labels = [f"{count}× {array_name(shape, dtype)}" for shape, dtype, count, _ in rows]
    _bars(ax, labels, [row[-1] for row in rows], "tab:orange")
    ax.set_xlabel("GB kept for the backward pass")
    return ax


def _bars(ax: Any, labels: Sequence[str], sizes: Sequence[int], color: Any) -> None:
    """Bars from the top down, with their bytes at their ends."""
    bars = ax.barh(range(len(sizes)), [size / 1e9 for size in sizes], color=color)
    ax.bar_label(bars, [format_bytes(size) for size in sizes], padding=3, fontsize="small")
    ax.margins(x=0.15)
    ax.set_yticks(range(len(sizes)), labels, fontsize="small")
    ax.invert_yaxis()


def plot_batches(found: "MaxBatch", ax: Any) -> Any:
    """The peak of each batch that was compiled, and the memory there is."""
    ax = ax or _new_axes()
    available = found.plan.available_bytes / 1e9
    for fits, color in ((True, "tab:green"), (False, "tab:red")):
        tried = [
            (batch, peak / 1e9)
            for batch, peak in sorted(found.tried.items())
            if (batch <= found.batch_size) is fits
        ]
        if tried:
            label = "fits" if fits else "does not fit"
            ax.plot(*zip(*tried, strict=True), "o", color=color, label=label)
    ax.axhline(available, color="black", linestyle="--", label="available")
    ax.set(xlabel="batch", ylabel="GB at the peak", xlim=0, ylim=0)
    ax.set_title(f"largest batch: {found.batch_size or 'none fits'}", fontsize="medium")
    ax.legend()
    return ax


def plot_comparison(plans: Mapping[str, "MemoryPlan"], ax: Any) -> Any:
    """A bar for each plan, by kind, and the memory there is."""
    ax = ax or _new_axes()
    left = [0.0] * len(plans)
    for kind, color in _COLORS.items():
        sizes = [parts(plan)[kind] / 1e9 for plan in plans.values()]
        if any(sizes):
            ax.barh(range(len(plans)), sizes, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    first = next(iter(plans.values()))
    available = first.available_bytes / 1e9
    if max(left) > available / 3:  # else it would flatten the bars
        ax.axvline(available, color="black", linestyle="--", label="available")
    ax.set_yticks(range(len(plans)), list(plans))
    ax.invert_yaxis()
    ax.legend()
    ax.set_xlabel(f"GB at the peak, of {available:.1f} on {first.target.description}")
    return ax


def _new_axes() -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(9, 4), layout="constrained")[1]
