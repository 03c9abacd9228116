"""Which implementations the battery runs, and the cases that all of them meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native
from tests.ops.roi import oracle

# "default" is what None does where there is no native code: XLA behind the operator's own rules.
IMPLEMENTATIONS = ["native", "xla", "default"]
NO_NATIVE = not native.is_available("cpu")
needs_native = pytest.mark.skipif(NO_NATIVE, reason="the native library is not built")


def _run_by(**marks):
    named = {"native": needs_native} | marks
    params = [pytest.param(name, marks=named.get(name, ())) for name in IMPLEMENTATIONS]
    return pytest.mark.parametrize("implementation", params, indirect=True)


all_implementations = _run_by()
# For what lies around the samples: there "native" and "default" are the same code.
all_rules = _run_by(default=() if NO_NATIVE else pytest.mark.exhaustive)
# And for what "xla" leaves to JAX.
own_rules = _run_by(default=() if NO_NATIVE else pytest.mark.exhaustive, xla=pytest.mark.exhaustive)

NAN, INF = np.nan, np.inf
# (x1, y1, x2, y2) in an image of 22 by 18 pixels, of which a feature map has one each two.
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

CASES = {
    "ratio": ("roi_align", dict(output_size=(3, 2), sampling_ratio=2)),
    "adaptive": ("roi_align", dict(output_size=(2, 3))),
    "unaligned": ("roi_align", dict(output_size=(2, 2), aligned=False)),
    "one_sample": ("roi_align", dict(output_size=(1, 4), sampling_ratio=1, aligned=False)),
    "moved": ("deform_roi_pool", dict(output_size=(2, 3), sampling_ratio=2, gamma=0.3)),
    "moved_adaptive": ("deform_roi_pool", dict(output_size=(2, 2), gamma=0.2)),
    "by_position": (
        "deform_psroi_pool",
        dict(output_size=(3, 3), group_size=2, part_size=2, sample_per_part=3, trans_std=0.2),
    ),
    "by_position_unmoved": ("deform_psroi_pool", dict(output_size=(2, 2), group_size=2)),
}


class Case:
    """Arguments, oracle and options of one case."""

    def __init__(self, name, batch=2, boxes=12, channels=6, seed=0, dtype=np.float64):
        self.name, options = CASES[name]
        self.options = options | {"spatial_scale": 0.5}
        rng = np.random.default_rng(seed)
        parts = options.get("group_size", 1) ** 2
        self.x = rng.normal(size=(batch, 9, 11, parts * channels)).astype(dtype)
        moved = BOXES + rng.uniform(0, 0.4, size=(batch, len(BOXES), 1))
        self.boxes = np.resize(moved, (batch, boxes, 4)) if boxes else moved[:, :0]
        size = options["output_size"]
        self.offset = None
        if "gamma" in options:
            self.offset = rng.normal(size=(batch, boxes, *size, 2))
        elif "trans_std" in options:
            part = options["part_size"]
            self.offset = rng.normal(size=(batch, boxes, part, part, 2 * 3))
        if self.offset is not None and batch and boxes > 7:
            self.offset[0, 0, 0, 0, :2] = [NAN, 0]
            self.offset[0, 1, 0, 0, :2] = [0, -INF]
            self.offset[0, 2, -1, -1, :2] = [1e30, 0]
        self.dy = rng.normal(size=(batch, boxes, *size, channels))

    @property
    def args(self):
        """What is differentiated."""
        return [self.x] if self.offset is None else [self.x, self.offset]

    def definition(self, dy=None, **changed):
        name = {"deform_roi_pool": "roi_align"}.get(self.name, self.name)
        given = {"x": self.x, "boxes": self.boxes, "offset": self.offset} | changed
        return getattr(oracle, name)(**given, dy=dy, **self.options)

    def want(self):
        y, gradients = self.definition(self.dy)
        return [y, *gradients]

    def run(self, implementation, **options):
        """The operator, of what is differentiated and of the boxes."""
        function = getattr(effjax, self.name)
        run = functools.partial(function, **self.options, **options, implementation=implementation)
        return lambda *args, boxes=self.boxes: run(args[0], boxes, *args[1:])

    def got(self, implementation, **options):
        y, backward = jax.vjp(self.run(implementation, **options), *map(jnp.asarray, self.args))
        return [y, *backward(jnp.asarray(self.dy, y.dtype))]
