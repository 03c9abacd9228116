"""Errors of ms_deform_attn and dcn_aggregate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import dcn_aggregate, ms_deform_attn

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
        (ValueError, r"`value` .* must be \(N, 7, M, D\)", {"value": VALUE[:, 1:]}),
        (TypeError, "`value` must be float32 or .* int32", {"value": VALUE.astype(np.int32)}),
        (ValueError, "`sampling_locations` .*2, Q, 3, 2, P", {"sampling_locations": AT[..., 0]}),
        (ValueError, "`attention_weights` .* must be", {"attention_weights": WEIGHTS[..., :2]}),
        (ValueError, "`spatial_shapes` .=0.", {"spatial_shapes": ((0, 3), (1, 7))}),
        (ValueError, "`implementation` .='cuda'.", {"implementation": "cuda"}),
    ],
)
def test_ms_deform_attn_rejects_bad_arguments(error, match, args):
    with pytest.raises(error, match=match):
        jax.eval_shape(lambda: ms_deform_attn(**{**GOOD, **args}))


def test_rejects_traced_spatial_shapes():
    with pytest.raises(TypeError, match="`spatial_shapes` must be an integer, not a traced array"):
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
    ("match", "args"),
    [
        (r"`x` of shape \(5, 4, 6\)", {"x": X[0]}),
        ("`mask` .* for K = 9 points", {"mask": WINDOW["mask"][..., :16]}),
        (r"`offset` .* must be \(2, 3, 2, 36\)", {"offset": WINDOW["mask"]}),
        (
            "`offset_groups` .=4. must divide",
            {"mask": np.zeros((2, 3, 2, 36)), "offset": np.zeros((2, 3, 2, 72))},
        ),
        ("`remove_center` needs", {"kernel_size": (2, 3), "remove_center": True}),
        ("`offset_scale` .=inf.", {"offset_scale": np.inf}),
    ],
)
def test_dcn_aggregate_rejects_bad_arguments(match, args):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: dcn_aggregate(**{**WINDOW, **args}))


def test_eval_shape():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (VALUE, AT, WEIGHTS)]
    run = lambda v, *others: ms_deform_attn(v, GOOD["spatial_shapes"], *others)  # noqa: E731
    y = jax.eval_shape(run, *shapes)
    assert (y.shape, y.dtype) == ((2, 5, 12), jnp.float32)
