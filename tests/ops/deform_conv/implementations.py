"""Which implementations the battery runs, and the cases that all of them meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from tests.ops.deform_conv import oracle

# "default" is what None does where there is no native code: XLA behind the operator's own rules.
IMPLEMENTATIONS = ["xla", "default", "native"]
NO_NATIVE = not native.is_available("cpu")
needs_native = pytest.mark.skipif(NO_NATIVE, reason="the native library is not built")


def _run_by(**marks):
    named = {"native": needs_native} | marks
    params = [pytest.param(name, marks=named.get(name, ())) for name in IMPLEMENTATIONS]
    return pytest.mark.parametrize("conv", params, indirect=True)


all_implementations = _run_by()
# For what lies around the samples: there "native" and "default" are the same code.
all_rules = _run_by(default=() if NO_NATIVE else pytest.mark.exhaustive)

CASES = {
    "plain": dict(c=3, o=2),
    # The grid of torchvision's tests.
    "all": dict(
        c=6, o=2, size=(5, 4), kernel=(3, 2), groups=2, offset_groups=3, strides=(2, 1),
        padding=((1, 1), (0, 0)), dilation=(2, 1),
    ),
    "one_sided": dict(
        c=4, o=4, size=(6, 3), kernel=(1, 3), padding=((0, 2), (2, 1)), strides=(2, 2)
    ),
    "pointwise": dict(c=4, o=3, kernel=(1, 1), groups=1, offset_groups=4),
}  # fmt: skip


class Case:
    """Arguments, oracle options and deform_conv2d options of one case."""

    def __init__(self, name, batch=2, optional=True, seed=0, dtype=np.float64, spread=1.5):
        self.make(**CASES[name], batch=batch, optional=optional, seed=seed, spread=spread)
        self.args = [a if a is None else a.astype(dtype) for a in self.args]

    def make(
        self, c, o, batch, optional, seed, spread, size=(5, 4), kernel=(3, 3), groups=1,
        offset_groups=1, strides=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1),
    ):  # fmt: skip
        self.oracle_options = dict(
            strides=strides, padding=padding, dilation=dilation, groups=groups,
            offset_groups=offset_groups,
        )  # fmt: skip
        self.options = dict(
            strides=strides, padding=padding, kernel_dilation=dilation, feature_group_count=groups
        )
        out = [
            (s + sum(p) - (k - 1) * d - 1) // t + 1
            for s, p, k, d, t in zip(size, padding, kernel, dilation, strides, strict=True)
        ]
        rng = np.random.default_rng(seed)
        taps = kernel[0] * kernel[1] * offset_groups
        self.args = [
            rng.normal(size=(batch, *size, c)),
            spread * rng.normal(size=(batch, *out, taps * 2)),
            rng.normal(size=(*kernel, c // groups, o)),
            rng.normal(size=(batch, *out, taps)) if optional else None,
            rng.normal(size=o) if optional else None,
        ]
        self.dy = rng.normal(size=(batch, *out, o))

    def want(self):
        y, gradients = oracle.deform_conv(*self.args, dy=self.dy, **self.oracle_options)
        return [y, *gradients]

    def got(self, conv, **options):
        """Y and the gradients of the arguments that are there."""
        run = functools.partial(conv, **self.options, **options)
        y, backward = jax.vjp(run, *map(_device, self.args))
        gradients = backward(jnp.asarray(self.dy, y.dtype))
        return [y, *(g for g in gradients if g is not None)]


def _device(a):
    return None if a is None else jnp.asarray(a)
