"""Draws the pictures of the pages: `python docs/draw.py` writes docs/images.

That of memory against depth is measured: `python -m effjax.bench.figure` draws it.
"""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
# They can be read on white and on black.
TEXT, FAINT = "#808890", "#80889040"
BLUE, GREEN, ORANGE, RED = "#539bf5", "#2da46e", "#e0823d", "#e5534b"
# Without dates or random names, the same program gives the same file. Text stays text.
STYLE = {"svg.hashsalt": "effjax", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT}


def panels(width, height, *ratios):
    """A figure with axes of these widths and no frames."""
    figure = Figure(figsize=(width, height), layout="constrained")
    ratios = ratios or (1,)
    axes = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    for ax in axes:
        ax.set_axis_off()
    return figure, *axes


def box(ax, x, y, width, height, color, text="", **options):
    ax.add_patch(
        matplotlib.patches.FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=color + "30", edgecolor=color, lw=1,
        )
    )  # fmt: skip
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=color, **options)


def arrow(ax, start, end, color=TEXT):
    style = dict(arrowstyle="-|>", color=color, lw=1, shrinkA=0, shrinkB=0, mutation_scale=8)
    ax.annotate("", end, start, arrowprops=style)


def offload(layers=4):
    """Copies and computation of a step, each layer loaded while the one before is computed."""
    figure, ax = panels(7.6, 2.5)
    rows = {"host → device": 2.2, "compute": 1.1, "device → host": 0.0}
    for name, y in rows.items():
        ax.text(-0.2, y + 0.4, name, ha="right", va="center")
        ax.plot([0, 20.2], [y - 0.14] * 2, color=FAINT, lw=0.6)
    into, compute, out = rows.values()
    loaded = computed = begun = written = 0.0
    passes = (
        (range(1, layers + 1), 1.0, 1.0, 0.5, "f", "x"),
        (range(layers, 0, -1), 1.6, 2.6, 1.4, "∇f", "Wm"),
    )
    for order, load, work, write, does, leaves in passes:
        first, loaded = computed, max(loaded, written)  # what the last layer leaves comes back
        for i in order:
            start = max(loaded, begun)  # when the layer before is computed, there is room
            loaded = start + load
            begun = max(loaded, computed)
            computed = begun + work
            start_write = max(written, computed)
            written = start_write + write
            brings = "W" if does == "f" else "Wmx"
            box(ax, start, into, load - 0.05, 0.8, BLUE, numbered(brings, i), fontsize=7.5)
            box(ax, begun, compute, work - 0.05, 0.8, GREEN, does + sub(i))
            box(ax, start_write, out, write - 0.05, 0.8, ORANGE, numbered(leaves, i), fontsize=7.5)
        name = {"f": "forward", "∇f": "backward: recompute, differentiate, update"}[does]
        ax.text((first + computed) / 2, 3.35, name, ha="center")
        if does == "f":
            ax.plot([computed] * 2, [-0.2, 3.6], color=TEXT, lw=0.8, ls=":")
    ax.text(written, -0.5, "time →", ha="right", va="center")
    ax.set(xlim=(-2.6, written + 0.1), ylim=(-0.7, 3.65))
    return figure


def sub(number):
    return "₀₁₂₃₄₅₆₇₈₉"[number]


def numbered(letters, number):
    return " ".join(letter + sub(number) for letter in letters)


def deform_conv():
    """Where the nine taps of one output pixel read, and what one sample is made of."""
    figure, ax, zoom = panels(7.6, 3.4, 1.25, 1)
    offsets = [
        (-0.8, -0.5), (0.3, -0.9), (0.7, -0.4), (-0.9, 0.3), (0.1, 0.2), (0.8, 0.35), (-0.5, 0.8),
        (0.25, 0.6), (0.65, 0.7),
    ]  # fmt: skip
    ax.plot(
        *zip(*[(x, y) for x in range(8) for y in range(7)], strict=True), "o", color=FAINT, ms=4
    )
    for k, (dx, dy) in enumerate(offsets):
        x, y = 2.5 + 1 + k % 3 - 1.5, 2 + k // 3
        last = k == len(offsets) - 1
        color = RED if last else GREEN
        ax.plot(x, y, "o", mfc="none", mec=TEXT, ms=8)
        arrow(ax, (x, y), (x + dx, y + dy), color)
        ax.plot(x + dx, y + dy, "o", color=color, ms=6)
    ax.plot(3, 3, "s", mfc="none", mec=BLUE, ms=15, mew=1.4)
    ax.text(1.3, 6.9, "○ taps, p + k", ha="center")
    ax.text(5.2, 6.9, "● read at p + k + Δₖ(p)", ha="center", color=GREEN)
    ax.text(2.62, 2.62, "p", ha="center", va="center", color=BLUE)
    ax.set(xlim=(-0.3, 7.3), ylim=(7.2, -0.3), aspect="equal")

    a, b = 0.65, 0.7
    zoom.plot([0, 1, 1, 0, 0], [0, 0, 1, 1, 0], color=FAINT, lw=1)
    for x, y in ((0, 0), (1, 0), (0, 1), (1, 1)):
        weight = (a if x else 1 - a) * (b if y else 1 - b)
        zoom.plot([x, a], [y, b], color=RED, lw=9 * weight, solid_capstyle="butt")
        zoom.plot(x, y, "o", color=TEXT, ms=7)
        zoom.text(x, y + (0.14 if y else -0.14), f"{weight:.2f}", ha="center", va="center")
    zoom.plot(a, b, "o", color=RED, ms=9)
    zoom.text(0.5, 1.3, "one sample: its four pixels, weighted", ha="center", color=RED)
    zoom.set(xlim=(-0.35, 1.35), ylim=(1.38, -0.3), aspect="equal")
    return figure


def batch_norm(devices=4):
    """What each device computes, and the one exchange."""
    figure, ax = panels(7.6, 2.9)
    for i in range(devices):
        x = 2.5 * i
        box(ax, x, 4.0, 2, 0.8, BLUE, f"examples of device {i}")
        arrow(ax, (x + 1, 3.95), (x + 1, 3.55))
        box(ax, x, 2.7, 2, 0.8, GREEN, f"n{sub(i)}, μ{sub(i)}, M{sub(i)} = Σ(x − μ{sub(i)})²")
        arrow(ax, (x + 1, 2.65), (x + 1, 2.25))
        arrow(ax, (x + 1, 1.55), (x + 1, 1.15))
        box(ax, x, 0.3, 2, 0.8, GREEN, "n, μ, σ² of all")
    box(ax, 0, 1.6, 2.5 * devices - 0.5, 0.6, ORANGE, "one all-reduce")
    ax.set(xlim=(-0.05, 2.5 * devices - 0.45), ylim=(0.2, 4.85))
    return figure


def main():
    with matplotlib.rc_context(STYLE):
        for name, draw in {
            "offload_timeline": offload,
            "deform_conv_taps": deform_conv,
            "batch_norm_devices": batch_norm,
        }.items():
            path = IMAGES / f"{name}.svg"
            draw().savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            print(path)


if __name__ == "__main__":
    main()
