"""Sampling operators without native code, and their unsupported derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from effjax import native

X = np.zeros((2, 5, 4, 8), np.float32)
BOXES = np.zeros((2, 3, 4), np.float32)
OFFSET, MASK = np.zeros((2, 3, 2, 18), np.float32), np.zeros((2, 3, 2, 9), np.float32)
KERNEL = np.zeros((3, 3, 8, 4), np.float32)
LOCATIONS = np.zeros((2, 5, 2, 1, 4, 2), np.float32)


def multiscale_roi_align(x, **options):
    return effjax.multiscale_roi_align([x], BOXES, output_size=2, spatial_scales=[1.0], **options)


def ms_deform_attn(x, **options):
    weights = LOCATIONS[..., 0]
    return effjax.ms_deform_attn(x.reshape(2, 20, 2, 4), ((5, 4),), LOCATIONS, weights, **options)


# Functions of the images.
OPERATORS = {
    "roi_align": lambda x, **options: effjax.roi_align(x, BOXES, output_size=2, **options),
    "multiscale_roi_align": multiscale_roi_align,
    "deform_roi_pool": lambda x, **options: effjax.deform_roi_pool(
        x, BOXES, output_size=2, **options
    ),
    "deform_psroi_pool": lambda x, **options: effjax.deform_psroi_pool(
        x, BOXES, output_size=2, **options
    ),
    "deform_conv2d": lambda x, **options: effjax.deform_conv2d(x, OFFSET, KERNEL, MASK, **options),
    "ms_deform_attn": ms_deform_attn,
    "dcn_aggregate": lambda x, **options: effjax.dcn_aggregate(x, OFFSET, MASK, **options),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_without_native_code(name, monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda platform: False)
    with pytest.raises(RuntimeError, match="no native .* for platform 'cpu'.*`effjax doctor`"):
        OPERATORS[name](X, implementation="native")
    assert OPERATORS[name](X).shape[0] == 2


@pytest.mark.parametrize("name", OPERATORS)
def test_native_code_for_another_platform(name, monkeypatch):
    """The platform is known when the program is compiled."""
    monkeypatch.setattr(native, "is_available", lambda platform: platform == "cuda")
    run = OPERATORS[name]
    jax.eval_shape(lambda: run(X, implementation="native"))
    with pytest.raises(RuntimeError, match="no native .* for platform 'cpu'"):
        run(X, implementation="native")
    assert run(X).shape[0] == 2


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
    needed = (
        f'`implementation="xla"` of effjax.{name}'
        + " and a positive `sampling_ratio`" * positive_ratio
    )

    def loss(x):
        return jnp.sum(OPERATORS[name](x, **options) ** 2)

    def scanned(x):
        return jax.lax.scan(lambda total, x: (total + loss(x), None), 0.0, x[None])[0]

    for run in (
        lambda x: jax.jvp(loss, (x,), (x,)),
        lambda x: jax.linearize(loss, x)[1](x),
        jax.jit(jax.jacfwd(loss)),
        lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))),
        jax.grad(lambda x: jnp.sum(jax.grad(scanned)(x))),
    ):
        with pytest.raises(NotImplementedError, match=rf"^{name} .*need {needed}\."):
            run(X)
