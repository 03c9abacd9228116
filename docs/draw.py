"""Draw the pictures of the documentation: `python docs/draw.py` writes docs/images.

kept_by_depth.svg is the picture of the benchmark `depth`.
"""

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
PLANNED = Path(__file__).parent / "measured" / "planned"
# Colors that are readable on white and on black.
TEXT, FAINT = "#808890", "#80889040"
BLUE, GREEN, ORANGE, RED = "#539bf5", "#2da46e", "#e0823d", "#e5534b"
# No dates or random names, so that the same program gives the same file. Text stays text.
STYLE = {"svg.hashsalt": "effjax", "svg.fonttype": "none", "font.size": 9, "text.color": TEXT}


def panels(width, height, *ratios):
    """Return a figure and its axes, without frames, of the given width ratios."""
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


def offload(layers=3):
    """Draw the copies and computations of an offloaded step, in the order of XLA's schedule.

    Only parameters, and inputs in the backward pass, load during the computation.
    """
    figure, ax = panels(7.6, 2.5)
    rows = {"host → device": 2.2, "compute": 1.1, "device → host": 0.0}
    into, compute, out = rows.values()
    load, reload, forward, leave = 1.0, 1.3, 1.2, 0.45  # durations, not to scale
    backward, load_moments, update, write = 2.3, 0.9, 0.6, 1.3

    def bar(start, y, duration, color, text):
        box(ax, start, y, duration - 0.05, 0.8, color, text, fontsize=7.5)
        return start + duration

    loaded = free = bar(0.0, into, load, BLUE, numbered("W", 1))
    for i in range(1, layers + 1):
        start = max(free, loaded)
        if i < layers:
            loaded = bar(start, into, load, BLUE, numbered("W", i + 1))
        free = bar(start, compute, forward, GREEN, numbered("f", i))
        free = bar(free, out, leave, ORANGE, numbered("x", i))
    middle = free
    loaded = bar(middle, into, reload, BLUE, numbered("Wx", layers))  # it is fetched again
    for i in range(layers, 0, -1):
        start = max(free, loaded)
        if i > 1:
            loaded = bar(start, into, reload, BLUE, numbered("Wx", i - 1))
        free = bar(start, compute, backward, GREEN, "∇f" + subscript(i))
        free = bar(free, into, load_moments, BLUE, numbered("m", i))
        free = bar(free, compute, update, GREEN, numbered("u", i))
        free = bar(free, out, write, ORANGE, numbered("Wm", i))
    for name, y in rows.items():
        ax.text(-0.2, y + 0.4, name, ha="right", va="center")
        ax.plot([0, free], [y - 0.14] * 2, color=FAINT, lw=0.6)
    ax.plot([middle] * 2, [-0.2, 3.6], color=TEXT, lw=0.8, ls=":")
    ax.text(middle / 2, 3.35, "forward", ha="center")
    ax.text((middle + free) / 2, 3.35, "backward, with updates", ha="center")
    ax.text(free, -0.5, "time →", ha="right", va="center")
    ax.set(xlim=(-2.6, free + 0.1), ylim=(-0.7, 3.65))
    return figure


def subscript(number):
    return "₀₁₂₃₄₅₆₇₈₉"[number]


def numbered(letters, number):
    return " ".join(letter + subscript(number) for letter in letters)


def deform_conv():
    """Draw where the nine taps of one output pixel read, and how one sample is interpolated."""
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
    """Draw what each device computes, and the all-reduce between them."""
    figure, ax = panels(7.6, 2.9)
    for i in range(devices):
        x = 2.5 * i
        box(ax, x, 4.0, 2, 0.8, BLUE, f"examples of device {i}")
        arrow(ax, (x + 1, 3.95), (x + 1, 3.55))
        box(
            ax,
            x,
            2.7,
            2,
            0.8,
            GREEN,
            f"n{subscript(i)}, μ{subscript(i)}, M{subscript(i)} = Σ(x − μ{subscript(i)})²",
        )
        arrow(ax, (x + 1, 2.65), (x + 1, 2.25))
        arrow(ax, (x + 1, 1.55), (x + 1, 1.15))
        box(ax, x, 0.3, 2, 0.8, GREEN, "n, μ, σ² of all")
    box(ax, 0, 1.6, 2.5 * devices - 0.5, 0.6, ORANGE, "one all-reduce")
    ax.set(xlim=(-0.05, 2.5 * devices - 0.45), ylim=(0.2, 4.85))
    return figure


# Name in the JSON: label, color, line width.
BLOCKS = {
    "plain autodiff": ("plain", RED, 1.8),
    "jax.checkpoint a layer": ("jax.checkpoint per layer", ORANGE, 1.8),
    "jax.checkpoint pass-through": ("jax.checkpoint, pass-through", "#c69026", 1.8),
    'effjax save="conv"': ('effjax, save="conv"', BLUE, 2.6),
    "jax.checkpoint pass-through, recompute conv1": (
        "jax.checkpoint, recomputing most",
        "#a8842c",
        1.8,
    ),
    'effjax save="features"': ('effjax, save="features"', GREEN, 2.6),
}
LABEL_GAP = 0.052  # between labels, as a fraction of the axis


def read_peaks():
    """Return {name: {layers: GB}} of the recorded plans of a dense block."""
    peaks = {name: {} for name in BLOCKS}
    for path in PLANNED.glob("memory_block_*_h200.json"):
        layers = int(path.stem.split("_")[2])
        for row in json.loads(path.read_text())["rows"]:
            if row["name"] in peaks:
                peaks[row["name"]][layers] = row["peak_bytes"] / 1e9
    return {name: dict(sorted(by_layers.items())) for name, by_layers in peaks.items()}


def memory_by_depth():
    """Draw the planned peak of a dense block against its depth, each line labeled at its end."""
    peaks = read_peaks()
    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    ax = figure.subplots(subplot_kw={"facecolor": "none"})
    layers = sorted({n for by_layers in peaks.values() for n in by_layers})
    top = 1.05 * max(max(by_layers.values()) for by_layers in peaks.values())
    height = -1.0
    for name, by_layers in sorted(peaks.items(), key=lambda item: item[1][layers[-1]]):
        label, color, width = BLOCKS[name]
        last = by_layers[layers[-1]]
        ax.plot([*by_layers], [*by_layers.values()], "o-", color=color, lw=width, ms=4)
        height = max(last / top, height + LABEL_GAP)
        ends = (1.005, 1.03), (last / top, height)
        ax.plot(*ends, color=color, lw=0.7, transform=ax.transAxes, clip_on=False)
        weight = "bold" if "effjax" in label else "normal"
        text = dict(color=color, fontsize=9, va="center", weight=weight, transform=ax.transAxes)
        ax.text(1.04, height, f"{label}  {last:.2f} GB", **text)
    ax.set(xlim=(0, layers[-1]), ylim=(0, top), xticks=layers)
    ax.set_xlabel("layers of the block", color=TEXT, fontsize=9)
    ax.set_ylabel("peak memory of a training step [GB]", color=TEXT, fontsize=9)
    title = "DenseNet-BC block, growth rate 12, batch 64 of 32×32, planned for H200"
    ax.set_title(title, color=TEXT, fontsize=9, loc="left")
    ax.tick_params(colors=TEXT, labelsize=9)
    ax.grid(color=FAINT, lw=0.6)
    for side, spine in ax.spines.items():
        spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure


def main():
    """Write all pictures."""
    with matplotlib.rc_context(STYLE):
        for name, draw in {
            "offload_timeline": offload,
            "deform_conv_taps": deform_conv,
            "batch_norm_devices": batch_norm,
            "memory_by_depth": memory_by_depth,
        }.items():
            path = IMAGES / f"{name}.svg"
            draw().savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            print(path)


if __name__ == "__main__":
    main()
