"""Sampling operators without native code, and their unsupported derivatives."""

import jax
import jax.numpy as jnp
import pytest

import effjax
from effjax import native
from tests.ops.arguments import GOOD

OPERATORS = [
    "roi_align", "multiscale_roi_align", "deform_roi_pool", "deform_psroi_pool", "deform_conv2d",
    "ms_deform_attn", "dcn_aggregate",
]  # fmt: skip


def bind(name, **options):
    """Return an operator as a function of the images, and the images."""
    first, *_ = GOOD[name]
    run = getattr(effjax, name)
    return lambda x: run(**GOOD[name] | {first: x} | options), GOOD[name][first]


@pytest.mark.parametrize("available", [None, "cuda"])
@pytest.mark.parametrize("name", OPERATORS)
def test_without_native_code(name, available, monkeypatch):
    """The platform is known when the program is compiled."""
    monkeypatch.setattr(native, "is_available", lambda platform: platform == available)
    run, x = bind(name, implementation="native")
    if available:
        jax.eval_shape(run, x)
    with pytest.raises(RuntimeError, match="no native .* for platform 'cpu'.*`effjax doctor`"):
        run(x)
    run, _ = bind(name)
    assert run(x).shape[0] == 2


@pytest.mark.parametrize(
    ("name", "options", "positive_ratio"),
    [
        *((name, {}, name in ("roi_align", "deform_roi_pool")) for name in OPERATORS),
        ("roi_align", {"sampling_ratio": 2}, False),
        # The number of samples depends on the boxes.
        ("roi_align", {"implementation": "xla"}, True),
        ("multiscale_roi_align", {"implementation": "xla", "sampling_ratio": 0}, True),
        ("deform_roi_pool", {"implementation": "xla"}, True),
    ],
    ids=str,
)
def test_rejects_forward_mode_and_second_order(name, options, positive_ratio):
    """The error names the operator and the options that these derivatives need."""
    needed = f'`implementation="xla"` of effjax.{name}'
    needed += " and a positive `sampling_ratio`" * positive_ratio
    run, images = bind(name, **options)

    def loss(x):
        return jnp.sum(run(x) ** 2)

    def slope(loss, x):
        return sum(jnp.sum(d) for d in jax.tree.leaves(jax.grad(loss)(x)))

    def scanned(x):
        xs = jax.tree.map(lambda a: a[None], x)
        return jax.lax.scan(lambda total, x: (total + loss(x), None), 0.0, xs)[0]

    for derivative in (
        lambda x: jax.jvp(loss, (x,), (x,)),
        lambda x: jax.linearize(loss, x)[1](x),
        jax.jit(jax.jacfwd(loss)),
        lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
        jax.grad(lambda x: slope(loss, x)),
        jax.grad(lambda x: slope(scanned, x)),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name} .*need {needed}\."):
            derivative(images)
