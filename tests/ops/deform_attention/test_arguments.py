"""What is refused, and what is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import dcn_aggregate, ms_deform_attn
from effjax.ops import _native

GOOD = {
    "value": np.zeros((2, 7, 3, 4), np.float32),
    "spatial_shapes": ((2, 3), (1, 1)),
    "sampling_locations": np.zeros((2, 5, 3, 2, 4, 2), np.float32),
    "attention_weights": np.zeros((2, 5, 3, 2, 4), np.float32),
}
VALUE, AT, WEIGHTS = (GOOD[n] for n in ("value", "sampling_locations", "attention_weights"))


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (
            ValueError,
            r"`value` of shape \(2, 7, 12\) must be .N, S, M, D.",
            {"value": VALUE.reshape(2, 7, 12)},
        ),
        (ValueError, "`value` .* M and D positive", {"value": VALUE[..., :0]}),
        (
            ValueError,
            r"`value` has 6 pixels .S., but `spatial_shapes` .* have 7",
            {"value": VALUE[:, 1:]},
        ),
        (TypeError, "`value` must be one of .* int32", {"value": VALUE.astype(np.int32)}),
        (TypeError, "`attention_weights` must be .* bool", {"attention_weights": WEIGHTS > 0}),
        (
            ValueError,
            r"`sampling_locations` .* must be \(2, Q, 3, 2, P, 2\)",
            {"sampling_locations": AT[..., 0]},
        ),
        (
            ValueError,
            r"`sampling_locations` .* must be \(2, Q, 3, 2, P, 2\)",
            {"sampling_locations": AT[:, :, :2]},
        ),
        (
            ValueError,
            r"`sampling_locations` .* must be \(2, Q, 3, 2, P, 2\)",
            {"sampling_locations": AT[:1]},
        ),
        (ValueError, "no points", {"sampling_locations": AT[..., :0, :]}),
        (
            ValueError,
            r"`attention_weights` .* must be \(2, 5, 3, 2, 4\)",
            {"attention_weights": WEIGHTS[..., :2]},
        ),
        (
            ValueError,
            "`spatial_shapes` has .2, 3, 1., but a level is",
            {"spatial_shapes": ((2, 3, 1),)},
        ),
        (ValueError, "`spatial_shapes` has .7,., but a level is", {"spatial_shapes": (7,)}),
        (ValueError, "`spatial_shapes` .=0.", {"spatial_shapes": ((0, 3), (1, 7))}),
        (TypeError, "`spatial_shapes` must be a sequence", {"spatial_shapes": ()}),
        (TypeError, "`spatial_shapes` must be a sequence", {"spatial_shapes": np.array([7, 1])}),
        (TypeError, "`spatial_shapes` must be an integer", {"spatial_shapes": ((2.0, 3), (1, 1))}),
        (ValueError, "`implementation` .='cuda'.", {"implementation": "cuda"}),
        (ValueError, "`workspace_bytes` .=0.", {"workspace_bytes": 0}),
        (TypeError, "`workspace_bytes` must be an integer", {"workspace_bytes": 1.5}),
    ],
    ids=range(19),
)
def test_bad_input(error, match, args):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: ms_deform_attn(**{**GOOD, **args}))


def test_traced_shapes_are_refused():
    with pytest.raises(TypeError, match="`spatial_shapes` must be of Python's integers"):
        jax.jit(ms_deform_attn)(VALUE, np.array(GOOD["spatial_shapes"]), AT, WEIGHTS)


def test_shapes_as_arrays():
    shapes = np.array(GOOD["spatial_shapes"])
    for given in (shapes, jnp.asarray(shapes), shapes.tolist()):
        assert ms_deform_attn(VALUE, given, AT, WEIGHTS).shape == (2, 5, 12)


X = np.zeros((2, 5, 4, 6), np.float32)
WINDOW = {
    "x": X,
    "offset": np.zeros((2, 3, 2, 36), np.float32),
    "mask": np.zeros((2, 3, 2, 18), np.float32),
}


@pytest.mark.parametrize(
    ("error", "match", "args"),
    [
        (ValueError, r"`x` of shape \(5, 4, 6\)", {"x": X[0]}),
        (ValueError, r"`x` of shape \(2, 0, 4, 6\) is empty", {"x": X[:, :0]}),
        (ValueError, "`mask` .* with a multiple of 9 channels", {"mask": WINDOW["mask"][..., :16]}),
        (ValueError, "`mask` .* with 27 channels", {"offset_groups": 3}),
        (ValueError, "`mask` .* must be .N, Ho, Wo, G . K., .2, 5, 4.", {"padding": 1}),
        (ValueError, r"`offset` .* must be \(2, 3, 2, 36\)", {"offset": WINDOW["mask"]}),
        (
            ValueError,
            "6 channels of `x` .* offset_groups .=4.",
            {"mask": np.zeros((2, 3, 2, 36)), "offset": np.zeros((2, 3, 2, 72))},
        ),
        (ValueError, "output would be empty", {"kernel_dilation": 2}),
        (
            ValueError,
            "`remove_center` needs .* kernel_size=.2, 3.",
            {"kernel_size": (2, 3), "remove_center": True},
        ),
        (TypeError, "`remove_center` must be True or False", {"remove_center": 1}),
        (ValueError, "`offset_scale` .=inf.", {"offset_scale": np.inf}),
        (ValueError, "`padding` .='FULL'.", {"padding": "FULL"}),
    ],
    ids=range(12),
)
def test_bad_windows(error, match, args):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: dcn_aggregate(**{**WINDOW, **args}))


def test_shapes_alone_are_enough():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (VALUE, AT, WEIGHTS)]
    run = lambda v, *others: ms_deform_attn(v, GOOD["spatial_shapes"], *others)  # noqa: E731
    y = jax.eval_shape(run, *shapes)
    assert (y.shape, y.dtype) == ((2, 5, 12), jnp.float32)


def test_native_that_is_nowhere(monkeypatch):
    monkeypatch.setattr(_native, "available", lambda: ())
    with pytest.raises(RuntimeError, match="no native ms_deform_attn for platform 'cpu'"):
        ms_deform_attn(**GOOD, implementation="native")
    with pytest.raises(RuntimeError, match="no native dcn_aggregate for platform 'cpu'"):
        dcn_aggregate(**WINDOW, implementation="native")


def test_native_that_is_elsewhere(monkeypatch):
    """Known only when the program is compiled; None takes XLA there."""
    monkeypatch.setattr(_native, "available", lambda: ("cuda",))
    jax.eval_shape(lambda: ms_deform_attn(**GOOD, implementation="native"))
    with pytest.raises(RuntimeError, match="for platform 'cpu'.*`effjax doctor`"):
        ms_deform_attn(**GOOD, implementation="native")
    assert ms_deform_attn(**GOOD).shape == (2, 5, 12)


LOSSES = {
    "ms_deform_attn": lambda v: jnp.sum(ms_deform_attn(**GOOD | {"value": v}) ** 2),
    "dcn_aggregate": lambda x: jnp.sum(dcn_aggregate(**WINDOW | {"x": x}) ** 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_has_a_gradient_only_says_so(name):
    loss, x = LOSSES[name], {"ms_deform_attn": VALUE, "dcn_aggregate": X}[name]
    derivatives = {
        "second": jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))),
        "jvp": lambda x: jax.jvp(loss, (x,), (x,)),
        "over reverse": lambda x: jax.jvp(jax.grad(loss), (x,), (x,)),
    }
    for run in derivatives.values():
        for transformed in (run, jax.jit(run)):
            with pytest.raises(NotImplementedError, match=f'{name} have.*`implementation="xla"`'):
                transformed(x)
