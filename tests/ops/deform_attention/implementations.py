"""Which implementations the battery runs, and the cases that all of them meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from tests.ops.deform_attention import oracle

# "default" is what None does where there is no native code: XLA behind the operator's own rules.
IMPLEMENTATIONS = ["xla", "default", "native"]
NO_NATIVE = not native.is_available("cpu")
needs_native = pytest.mark.skipif(NO_NATIVE, reason="the native library is not built")


def run_by(operator, **marks):
    """Each implementation of `attn` or `dcn`."""
    named = {"native": needs_native} | marks
    params = [pytest.param(name, marks=named.get(name, ())) for name in IMPLEMENTATIONS]
    return pytest.mark.parametrize(operator, params, indirect=True)


all_implementations = run_by("attn")
# For what lies around the samples: there "native" and "default" are the same code.
all_rules = run_by("attn", default=() if NO_NATIVE else pytest.mark.exhaustive)

# For what lies around the operator: XLA's form is what the caller wrote.
around = run_by(
    "attn", default=() if NO_NATIVE else pytest.mark.exhaustive, xla=pytest.mark.exhaustive
)

CASES = {
    "levels": dict(shapes=((4, 5), (3, 2), (1, 1)), heads=2, depth=3, points=2),
    "one": dict(shapes=((3, 4),), heads=1, depth=1, points=1),
    # Channels in vectors and a rest, more points than are computed together.
    "wide": dict(shapes=((5, 3), (2, 2), (1, 3), (2, 1)), heads=2, depth=53, points=5),
}


class Case:
    """Arguments of one case, and its results by the definition."""

    def __init__(self, name, **options):
        self.make(**CASES[name], **options)

    def make(
        self, shapes, heads, depth, points, batch=2, queries=5, seed=0, spread=0.4,
        dtype=np.float64,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.shapes, at = shapes, (batch, queries, heads, len(shapes), points)
        args = (
            rng.normal(size=(batch, sum(h * w for h, w in shapes), heads, depth)),
            0.5 + spread * rng.normal(size=(*at, 2)),
            rng.normal(size=at),
        )
        self.args = [a.astype(dtype) for a in args]
        self.dy = rng.normal(size=(batch, queries, heads * depth)).astype(dtype)

    def want(self):
        value, *others = self.args
        y, gradients = oracle.attention(value, self.shapes, *others, self.dy)
        return [y, *gradients]

    def run(self, attn, **options):
        """The operator as a function of arrays alone."""
        return lambda value, *others: attn(value, self.shapes, *others, **options)

    def got(self, attn, **options):
        y, backward = jax.vjp(self.run(attn, **options), *map(jnp.asarray, self.args))
        return [y, *backward(jnp.asarray(self.dy, y.dtype))]
