"""Draw the pictures of the documentation: `python -m docs.draw` writes docs/images.

Run it in the root of a clone. The plots show recorded numbers (docs/measured).
"""

import json
import math
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
MEASURED = Path(__file__).parent / "measured"
# Colors that are readable on white and on black.
TEXT, FAINT = "#808890", "#80889040"
# One color per method, in every picture.
PALETTE = {
    "plain": "#e5534b",  # automatic differentiation, everything in device memory
    "jax.checkpoint": "#e0823d",  # around each layer
    "jax.checkpoint pass-through": "#c69026",  # around each layer, with the features passed through
    "jax.checkpoint strongest": "#8d6e63",  # the same, recomputing the 1x1 convolutions
    "effjax": "#2da46e",  # also save="features", which keeps least
    "effjax conv": "#539bf5",  # save="conv"
    "effjax offload": "#986ee2",  # layers streamed from host memory
}
# Colors of the schematics. Methods have those of the palette.
BLUE, GREEN, ORANGE, RED, PURPLE = "#539bf5", "#2da46e", "#e0823d", "#e5534b", "#986ee2"
STYLE = {"font.size": 9, "text.color": TEXT}


def save(figure, path):
    """Save a figure; equal data give an equal file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "effjax", "svg.fonttype": "none"}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata, dpi=150)


def label_ends(ax, ends, gap):
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


def new_figure(title, height, width):
    """Return a figure and its axes, transparent and without a frame."""
    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.subplots(subplot_kw={"facecolor": "none"})
    ax.set_title(title, color=TEXT, fontsize=9, loc="left", wrap=True, pad=12)
    ax.tick_params(colors=TEXT, labelsize=9)
    for side, spine in ax.spines.items():
        spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure, ax


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

    In the backward pass, results leave during the turn of the layer before, while its moments load.
    """
    figure, ax = panels(7.6, 2.5)
    rows = {"host → device": 2.2, "compute": 1.1, "device → host": 0.0}
    into, compute, out = rows.values()
    load, forward, leave = 1.0, 1.2, 0.45  # durations, not to scale
    backward, moments, update = 2.6, 1.5, 0.6

    def bar(start, y, duration, color, text):
        box(ax, start, y, duration - 0.05, 0.8, color, text, fontsize=7.5)
        return start + duration

    loaded = free = bar(0.0, into, load, BLUE, numbered("W", 1))
    for i in range(1, layers + 1):
        start = max(free, loaded)
        bar(start, out, leave, ORANGE, numbered("x", i))
        if i < layers:
            loaded = bar(start, into, load, BLUE, numbered("W", i + 1))
        free = bar(start, compute, forward, GREEN, numbered("f", i))
    middle = free
    bar(middle, into, load, BLUE, numbered("W", layers))  # it is fetched again
    free = middle + load
    for i in range(layers, 0, -1):
        start = free
        if i > 1:
            free = bar(start, into, load, BLUE, numbered("W", i - 1))
        bar(
            max(free, start + (moments if i < layers else 0)), into, moments, BLUE, numbered("m", i)
        )
        if i < layers:
            left = bar(start, out, moments, ORANGE, numbered("m", i + 1))
            bar(left, out, load, ORANGE, numbered("W", i + 1))
        free = bar(free, compute, backward, GREEN, "∇f" + subscript(i))
        free = bar(free, compute, update, GREEN, numbered("u", i))
    free = bar(free, out, moments + load, ORANGE, numbered("Wm", 1))
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


def channels(ax, x, y, widths, color, kept=True):
    """Draw an array as a row of boxes, as wide as their channels; dashed if it is not kept."""
    style = dict(facecolor=color + "70", edgecolor=color, lw=0.8)
    if not kept:
        style = dict(facecolor="none", edgecolor=TEXT, lw=0.7, ls=(0, (2, 1.5)))
    for width in widths:
        ax.add_patch(matplotlib.patches.Rectangle((x, y), width, 0.5, **style))
        x += width


def statistics(ax, x, y, count):
    """Draw a dot per channel."""
    ax.plot([x + i + 0.5 for i in range(count)], [y + 0.25] * count, "o", color=ORANGE, ms=4)


def dense_block(layers=4):
    """Draw the arrays of each layer of a dense block, and which of them are kept."""
    figure, plain, ours = panels(7.6, 3.7, 1, 1)
    wide, gap = layers + 1, 0.8  # channels in units of the growth rate; the input has two
    columns = [0, wide + gap, 2 * (wide + gap), 2 * (wide + gap) + 4 + gap]
    end = columns[-1] + 1

    for ax, name, color in ((plain, "plain autodiff", RED), (ours, "effjax.dense_block", GREEN)):
        efficient = ax is ours
        ax.text(end / 2, 1.95, name, ha="center", color=color, weight="bold", fontsize=10)
        headings = "concatenation", "norm, ReLU", "1×1 conv", "3×3\nconv"
        for x, width, text in zip(columns, (wide, wide, 4, 1), headings, strict=True):
            ax.text(x + width / 2, 0.9, text, ha="center", va="bottom", fontsize=7.5)
        channels(ax, columns[3] - 1, 0.25, [2], color)
        ax.text(columns[3] - 1.2, 0.5, "input", ha="right", va="center", fontsize=7.5)
        statistics(ax, columns[3] - 1, 0.25, 2 if efficient else 0)
        for i in range(layers):
            y, widths = -0.75 * (i + 1), [2] + [1] * i
            ax.text(-0.4, y + 0.25, f"layer {i + 1}", ha="right", va="center", fontsize=7.5)
            channels(ax, columns[0], y, widths, color, kept=not efficient)
            channels(ax, columns[1], y, widths, color, kept=not efficient)
            channels(ax, columns[2], y, [4], PALETTE["effjax conv"] if efficient else color)
            channels(ax, columns[3], y, [1], color)
            if not efficient:
                statistics(ax, columns[1], y, 2 + i)
            elif i < layers - 1:  # no layer of the block reads the last one
                statistics(ax, columns[3], y, 1)
        ax.set(xlim=(-3.4, end + 0.3), ylim=(-0.75 * layers - 2.5, 2.4))

    for ax, *lines in (
        (plain, "kept for the backward pass", "", "statistics of a channel: in each layer"),
        (ours, 'kept; blue only by save="conv"', "recomputed", "statistics of a channel: once"),
    ):
        for row, text in enumerate(lines):
            y = -0.75 * layers - 1.05 - 0.65 * row
            ax.text(2.2, y + 0.25, text, va="center", fontsize=8)
            if row == 2:
                statistics(ax, 0.3, y, 1)
            elif text:
                channels(ax, 0, y, [1], RED if ax is plain else GREEN, kept=row == 0)
                if row == 0 and ax is ours:
                    channels(ax, 1, y, [0.8], PALETTE["effjax conv"])
    return figure


SHAPES = (  # kind, center and half of the side, in pixels of an image of 128x128
    ("triangle", (28, 30), 11),
    ("circle", (92, 30), 23),
    ("square", (52, 84), 40),
)


def detection():
    """Draw a backbone, its pyramid, and the level from which each box is pooled."""
    figure, ax = panels(7.6, 3.2)
    colors, strides = (GREEN, BLUE, PURPLE), (4, 8, 16)
    size = 128

    def frame(x, y, side, color=TEXT, cells=0, **options):
        ax.add_patch(
            matplotlib.patches.Rectangle(
                (x, y), side, side, facecolor=color + "18", edgecolor=color, **{"lw": 1} | options
            )
        )
        # All lines of one direction are one path; NaN separates them.
        across = [at for _ in range(1, cells) for at in (0, side, math.nan)]
        along = [side * i / cells for i in range(1, cells) for _ in range(3)]
        for dx, dy in ((across, along), (along, across)):
            at = [x + a for a in dx], [y + a for a in dy]
            ax.plot(*at, color=color, lw=0.5, alpha=0.45)

    def box_on(x, y, side, center, half, color, lw=1.6):
        scale = side / size
        corner = x + (center[0] - half) * scale, y + side - (center[1] + half) * scale
        frame(*corner, 2 * half * scale, color, lw=lw)

    image, at_image = 4.2, (0, 2.2)
    frame(*at_image, image)
    for kind, (x, y), half in SHAPES:
        scale = image / size
        middle, radius = (at_image[0] + x * scale, at_image[1] + image - y * scale), half * scale
        if kind == "circle":
            shape = matplotlib.patches.Circle(middle, radius, fc=FAINT, ec=TEXT, lw=0.8)
        elif kind == "square":
            shape = matplotlib.patches.Rectangle(
                (middle[0] - radius, middle[1] - radius), 2 * radius, 2 * radius,
                fc=FAINT, ec=TEXT, lw=0.8,
            )  # fmt: skip
        else:
            points = [(-radius, -radius), (radius, -radius), (0, radius)]
            shape = matplotlib.patches.Polygon(
                [(middle[0] + dx, middle[1] + dy) for dx, dy in points], fc=FAINT, ec=TEXT, lw=0.8
            )
        ax.add_patch(shape)
    ax.text(image / 2, at_image[1] - 0.2, "image and boxes", ha="center", va="top")

    sides, bottoms = (3.3, 2.3, 1.6), (0.0, 3.7, 6.4)
    backbone, pyramid, pooled = 7.6, 12.6, 17.2
    for level, (side, y, stride) in enumerate(zip(sides, bottoms, strides, strict=True)):
        color = colors[level]
        left = backbone - side / 2
        frame(left, y, side, cells=size // stride)
        plane = pyramid - side / 2
        frame(plane, y, side, color, cells=size // stride)
        arrow(ax, (left + side + 0.1, y + side / 2), (plane - 0.1, y + side / 2))
        ax.text(left - 0.15, y + side, f"stride {stride}", ha="right", va="top", fontsize=7.5)
        if level:  # up the backbone, down the pyramid
            below = bottoms[level - 1] + sides[level - 1]
            arrow(ax, (backbone, below + 0.05), (backbone, y - 0.05))
            arrow(ax, (pyramid, y - 0.05), (pyramid, below + 0.05), color)
    arrow(ax, (image + 0.1, at_image[1] + 0.5), (backbone - sides[0] / 2 - 0.1, 1.9))
    ax.text(backbone, 8.65, "ResNet", ha="center", weight="bold")
    ax.text(backbone, 8.2, "deformable stages", ha="center", fontsize=7.5)
    ax.text(pyramid, 8.65, "FeaturePyramid", ha="center", weight="bold")
    ax.text(pyramid, 8.2, "features of all strides", ha="center", fontsize=7.5)
    ax.text(pooled + 0.7, 8.65, "multiscale_roi_align", ha="center", weight="bold")
    ax.text(pooled + 0.7, 8.2, "each box from one level", ha="center", fontsize=7.5)

    for kind, center, half in SHAPES:
        # The rule of effjax.multiscale_roi_align for canonical_scale=32 and canonical_level=3.
        level = math.floor(3 + math.log2(2 * half / 32)) - 2
        color, side, y = colors[level], sides[level], bottoms[level]
        box_on(*at_image, image, center, half, color)
        box_on(pyramid - side / 2, y, side, center, half, color)
        middle = y + side / 2
        frame(pooled, middle - 0.7, 1.4, color, cells=7)
        arrow(ax, (pyramid + side / 2 + 0.1, middle), (pooled - 0.1, middle), color)
        arrow(ax, (pooled + 1.5, middle), (pooled + 2.2, middle), color)
        ax.text(pooled + 2.3, middle, f"{kind},\nrefined box", va="center", color=color)
    ax.set(xlim=(-0.1, pooled + 4.9), ylim=(-0.1, 9.0), aspect="equal")
    return figure


# The same training step twice; tests/test_docs.py runs both.
BEFORE = """\
model = nnx.Sequential(*layers)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, labels):
    def loss_fn(model):
        return cross_entropy(model(x), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
"""
AFTER = """\
model = effjax.nnx.OffloadModel(layers).to_host()
optimizer = effjax.nnx.OffloadOptimizer(model, tx)


@effjax.nnx.offload_jit
def train_step(model, optimizer, x, labels):
    def loss_fn(model):
        return cross_entropy(model(x), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss
"""


def before_after():
    """Draw a training step in device memory and offloaded, with the changed lines marked."""
    figure, *axes = panels(7.6, 2.75, 1, 1)
    before, after = BEFORE.splitlines(), AFTER.splitlines()
    titles = "everything in device memory", "everything in host memory"
    colors = PALETTE["plain"], PALETTE["effjax offload"]
    programs = zip(axes, titles, (before, after), colors, strict=True)
    for ax, title, lines, color in programs:
        ax.text(0, 1.3, title, color=color, weight="bold", fontsize=10)
        for i, (line, old, new) in enumerate(zip(lines, before, after, strict=True)):
            if old != new:
                style = dict(facecolor=color + "28", edgecolor="none")
                ax.add_patch(matplotlib.patches.Rectangle((-0.6, -i - 0.5), 58, 1, **style))
            style = dict(va="center", family="monospace", fontsize=7.4)
            ax.text(0, -i, line.replace(" ", "\u00a0"), parse_math=False, **style)
        ax.set(xlim=(-0.6, 57.4), ylim=(-len(lines) + 0.3, 2.1))
    return figure


# Labels and methods of the programs in the JSON; the right panel shows the last four.
BLOCKS = {
    "plain autodiff": ("plain autodiff", "plain"),
    "jax.checkpoint a layer": ("jax.checkpoint\nper layer", "jax.checkpoint"),
    "jax.checkpoint pass-through": (
        "jax.checkpoint,\nfeatures passed through", "jax.checkpoint pass-through"
    ),
    'effjax save="conv"': ('effjax save="conv"', "effjax conv"),
    "jax.checkpoint pass-through, recompute conv1": (
        "strongest jax.checkpoint", "jax.checkpoint strongest"
    ),
    'effjax save="features"': ('effjax save="features"', "effjax"),
}  # fmt: skip


def read_peaks():
    """Return {name: {layers: GB}} of the recorded plans of a dense block."""
    peaks = {name: {} for name in BLOCKS}
    for path in MEASURED.glob("planned/memory_block_*_h200.json"):
        layers = int(path.stem.split("_")[2])
        for row in json.loads(path.read_text())["rows"]:
            if row["name"] in peaks:
                peaks[row["name"]][layers] = row["peak_bytes"] / 1e9
    return {name: dict(sorted(by_layers.items())) for name, by_layers in peaks.items()}


def memory_by_depth():
    """Draw the planned peak of a dense block against its depth: all programs, and the best."""
    peaks = read_peaks()
    figure, left = new_figure("all", 3.5, 7.6)
    left.remove()
    left, right = figure.subplots(
        1, 2, width_ratios=(1, 1), subplot_kw={"facecolor": "none"}, gridspec_kw={"wspace": 0.1}
    )
    layers = [*next(iter(peaks.values()))]
    best = list(BLOCKS)[2:]
    for ax, names in ((left, list(BLOCKS)), (right, best)):
        for name in names:
            ours = "effjax" in name
            ax.plot(
                layers, peaks[name].values(), "o-", color=PALETTE[BLOCKS[name][1]],
                lw=2.6 if ours else 1.8, ms=4,
            )  # fmt: skip
        top = 1.05 * max(peaks[name][layers[-1]] for name in names)
        ax.set(xlim=(0, layers[-1] + 1), ylim=(0, top), xticks=layers)
        ax.set_xlabel("layers of the block", color=TEXT, fontsize=9)
        ax.tick_params(colors=TEXT, labelsize=9)
        ax.grid(color=FAINT, lw=0.6)
        for side, spine in ax.spines.items():
            spine.set(color=TEXT, visible=side in ("left", "bottom"))
    left.set_ylabel("peak of a training step [GB]", color=TEXT, fontsize=9)
    left.set_title("all", color=TEXT, fontsize=9, loc="left")
    right.set_title("the best four, enlarged", color=TEXT, fontsize=9, loc="left")
    for ax, names in ((left, list(BLOCKS)[:2]), (right, best)):
        ends = []
        for name in names:
            last = peaks[name][layers[-1]]
            text, method = BLOCKS[name]
            label = f"{text}\n{last:.2f} GB"
            ends.append(((layers[-1], last), label, PALETTE[method], "effjax" in name))
        label_ends(ax, ends, gap=0.125)
    title = "DenseNet-BC block, growth rate 12, batch 64 of 32×32 images, planned for an H200"
    figure.suptitle(title, color=TEXT, fontsize=9, x=0.01, ha="left")
    return figure


# Mean of the losses of so many steps, and the color of each dtype of the products.
SMOOTHED = 10
PRODUCTS = {"float32": TEXT, "bfloat16": BLUE, "fp8": RED}


def fp8_losses():
    """Draw the smoothed losses of fine-tuning by dtype of the products, and their differences."""
    record = json.loads((MEASURED / "cpu" / "fp8_losses.json").read_text())
    figure, left = new_figure("", 3.2, 7.6)
    left.remove()
    left, right = figure.subplots(1, 2, subplot_kw={"facecolor": "none"})
    runs = {(row["dtype"], row["seed"]): row["losses"] for row in record["rows"]}

    def smooth(losses):
        ends = range(SMOOTHED, len(losses) + 1)
        return [math.fsum(losses[i - SMOOTHED : i]) / SMOOTHED for i in ends]

    for (dtype, seed), losses in runs.items():
        style = dict(color=PRODUCTS[dtype], lw=1.2, alpha=0.9)
        steps = range(SMOOTHED, len(losses) + 1)
        left.plot(steps, smooth(losses), label="" if seed else dtype, **style)
        if dtype != "bfloat16":
            others = runs["bfloat16", seed]
            differences = [a - b for a, b in zip(losses, others, strict=True)]
            right.plot(steps, smooth(differences), **style)
    left.set_ylabel("loss", color=TEXT, fontsize=9)
    left.legend(frameon=False, labelcolor="linecolor", fontsize=9)
    left.set_title(f"mean of {SMOOTHED} steps", color=TEXT, fontsize=9, loc="left")
    right.set_title("minus that of bfloat16 with the same seed", color=TEXT, fontsize=9, loc="left")
    for ax in (left, right):
        ax.set_xlabel("step", color=TEXT, fontsize=9)
        ax.tick_params(colors=TEXT, labelsize=9)
        ax.grid(color=FAINT, lw=0.6)
        for side, spine in ax.spines.items():
            spine.set(color=TEXT, visible=side in ("left", "bottom"))
    return figure


PICTURES = {
    "offload_timeline": offload,
    "deform_conv_taps": deform_conv,
    "batch_norm_devices": batch_norm,
    "dense_block": dense_block,
    "detection": detection,
    "before_after": before_after,
    "memory_by_depth": memory_by_depth,
    "fp8_losses": fp8_losses,
}


def main():
    """Write all pictures."""
    with matplotlib.rc_context(STYLE):
        for name, draw_picture in PICTURES.items():
            path = IMAGES / f"{name}.svg"
            save(draw_picture(), path)
            print(path)


if __name__ == "__main__":
    main()
