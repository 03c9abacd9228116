"""Cases of the operators that pool boxes."""

import numpy as np

import effjax
from tests.ops.battery import Case, Operator
from tests.ops.samplers.roi import oracle

NAN, INF = np.nan, np.inf
# (x1, y1, x2, y2) in an image of 22 by 18 pixels; the feature map has half the resolution.
BOXES = np.array([
    [2, 3, 15, 12.5],
    [-9, -7, 9, 8],          # partly outside
    [11, 7, 60, 70],
    [-90, -80, -30, -20],    # wholly outside
    [9, 8, 5, 3],            # corners in the wrong order
    [5, 4, 5, 9],            # a line
    [6.5, 6.5, 6.6, 6.7],    # less than a pixel
    [0, 0, 22, 18],
    [-300, -200, 500, 400],  # far larger than the image
    [NAN, 1, 5, 5],
    [1, 1, INF, 5],
    [1, -INF, 8, 5],
])  # fmt: skip

# Positions at and beyond the borders of 9 or 11 pixels: samples are zero unless -1 <= position <=
# size, and clamped to the outermost pixels.
EDGES = [-1.5, -1.0, -0.5, 0.0, 1.25, 8.0, 8.5, 9.0, 9.5, 10.0, 10.5, 11.0, 11.5]

CASES = {
    "ratio": ("roi_align", dict(output_size=(3, 2), sampling_ratio=2)),
    "adaptive": ("roi_align", dict(output_size=(2, 3))),
    "unaligned": ("roi_align", dict(output_size=(2, 2), aligned=False)),
    "one_sample": ("roi_align", dict(output_size=(1, 4), sampling_ratio=1, aligned=False)),
    "offset": ("deform_roi_pool", dict(output_size=(2, 3), sampling_ratio=2, gamma=0.3)),
    "offset_adaptive": ("deform_roi_pool", dict(output_size=(2, 2), gamma=0.2)),
    "by_position": (
        "deform_psroi_pool",
        dict(output_size=(3, 3), group_size=2, part_size=2, sample_per_part=3, trans_std=0.2),
    ),
    "by_position_no_offset": ("deform_psroi_pool", dict(output_size=(2, 2), group_size=2)),
    "edges": ("deform_roi_pool", dict(output_size=(1, 1), sampling_ratio=1)),
}


def make(name, batch=2, boxes=12, channels=6, seed=0, dtype=np.float64):
    """Return a case whose arguments are x, offset (if the operator has one) and boxes."""
    function, options = CASES[name]
    options = options | {"spatial_scale": 0.5}
    rng = np.random.default_rng(seed)
    blocks = options.get("group_size", 1) ** 2
    x = rng.normal(size=(batch, 9, 11, blocks * channels)).astype(dtype)
    shifted = BOXES + rng.uniform(0, 0.4, size=(batch, len(BOXES), 1))
    all_boxes = np.resize(shifted, (batch, boxes, 4)) if boxes else shifted[:, :0]
    if name == "edges":  # boxes of one sample in the middle
        middle = np.array([[x, y] for y in EDGES for x in EDGES]) + 0.5
        boxes = len(middle)
        all_boxes = np.tile(np.concatenate([middle - 1, middle + 1], -1) / 0.5, (batch, 1, 1))
    size = options["output_size"]
    offset = np.zeros((batch, boxes, 1, 1, 2)) if name == "edges" else None
    if "gamma" in options:
        offset = rng.normal(size=(batch, boxes, *size, 2))
    elif "trans_std" in options:
        part = options["part_size"]
        offset = rng.normal(size=(batch, boxes, part, part, 2 * 3))
    if name != "edges" and offset is not None and batch and boxes > 7:
        offset[0, 0, 0, 0, :2] = [NAN, 0]
        offset[0, 1, 0, 0, :2] = [0, -INF]
        offset[0, 2, -1, -1, :2] = [1e30, 0]
    dy = rng.normal(size=(batch, boxes, *size, channels))
    return make_from(function, x, offset, all_boxes, dy, options)


def make_from(function, x, offset, boxes, dy, options):
    has_offset = offset is not None

    def bind(implementation, **more):
        run = getattr(effjax, function)
        more |= options | {"implementation": implementation}
        return lambda x, *args: run(x, args[-1], *args[:-1], **more)

    def definition(x, *args):
        *offsets, boxes, dy = args
        run = oracle.deform_psroi_pool if "psroi" in function else oracle.roi_align
        return run(x, boxes, *offsets, dy=dy, **options)

    args = [x, offset, boxes] if has_offset else [x, boxes]
    return Case(bind, definition, args, dy, differentiable=1 + has_offset)


def between_pixels(name="offset_adaptive"):
    """Return a case without samples near a kink of the interpolation."""
    c = make(name, batch=1, boxes=3, channels=3 if name == "by_position" else 2)
    c.args[-1] = np.array([[[2.3, 3.1, 15.2, 12.6], [-5.3, -4.2, 9.1, 8.4], [6.5, 6.4, 9.3, 8.2]]])
    if c.differentiable == 2:
        c.args[1] = np.random.default_rng(5).uniform(-0.4, 0.4, size=c.args[1].shape)
    return c


OPERATOR = Operator(
    make=make,
    cases=tuple(CASES),
    plain_case="offset_adaptive",
    # A loop whose length depends on the boxes, and offsets.
    context_case="offset_adaptive",
    xla_context_case="offset",  # JAX differentiates this one
    context_options=dict(boxes=4, channels=3),
    sizes=(
        ("adaptive", dict(batch=0, boxes=3, channels=2)),
        ("adaptive", dict(batch=1, boxes=0, channels=2)),
        ("offset", dict(batch=1, boxes=5, channels=97)),
        ("by_position_no_offset", dict(batch=1, boxes=5, channels=97)),
    ),
    mapped=((0, None, None), (None, None, 0)),
    derivatives=between_pixels,
    options={},
)
