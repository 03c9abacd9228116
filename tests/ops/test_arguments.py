"""Arguments of the operators: the forms that they accept, and errors that name the argument."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effjax
from tests.ops.arguments import BOXES, GOOD, IMAGE, Q, X, ones
from tests.ops.dense_block.cases import make_params

KEY = jax.random.key(0)


def call(name, args):
    return jax.eval_shape(lambda: getattr(effjax, name)(**GOOD[name] | args))


# Wrong arguments of each operator. The error names the first of them.
WRONG_TYPES = {
    "dot_product_attention": [
        {"q": Q.astype(int)}, {"k": Q.astype("f2")}, {"segment_ids": Q[..., 0, 0]},
    ],
    "linear_cross_entropy": [{"x": ones(4, 3, dtype=int)}],
    "expert_mlp": [
        {"x": ones(4, 3, dtype=int)}, {"experts": ones(4, 2)}, {"weights": ones(4, 2, dtype=int)},
        {"down": None},
    ],
    "fp8_linear": [
        {"x": ones(4, 3, dtype=int)}, {"x": jnp.ones((4, 3), "float8_e4m3fn")}, {"kernel": None},
        {"kernel": ones(3, 5, dtype=int)},
    ],
    "sync_batch_norm": [
        {"x": [1.0]}, {"x": object()}, {"mask": ones(4, 3, 5)},
        {"residual": ones(4, 3, 5, dtype="f2")},
        {"epsilon": ones(2)},
    ],
    "bn_relu_conv": [{"chunk_size": 1.0}],
    "dense_block": [
        {"params": GOOD["dense_block"]["params"][0]}, {"key": None, "dropout_rate": 0.1},
        {"key": 0, "dropout_rate": 0.1}, {"key": ones(2), "dropout_rate": 0.1},
        {"key": jax.random.split(KEY), "dropout_rate": 0.1},
    ],
    "deform_conv2d": [{"x": X.astype(int)}],
    "ms_deform_attn": [{"value": ones(2, 7, 3, 4, dtype=int)}],
    "roi_align": [{"boxes": BOXES.astype(complex)}],
}  # fmt: skip
WRONG_VALUES = {
    "dot_product_attention": [
        {"q": Q[0]}, {"k": Q[:, :3]}, {"k": Q[:, :, :3], "v": Q[:, :, :3]}, {"v": Q[:, :, :2]},
        {"segment_ids": ones(4, dtype=int)}, {"window": 0}, {"window": 2, "causal": False},
        {"chunk_size": 0}, {"scale": np.inf}, {"softcap": 0},
        {"softcap": 2.0, "implementation": "cudnn"}, {"implementation": "flash"},
        {"implementation": "splash"},
    ],
    "linear_cross_entropy": [
        {"x": ones(4, 2)}, {"kernel": ones(3)}, {"kernel": ones(3), "transposed": True},
        {"kernel": ones(3, 5), "transposed": True}, {"labels": ones(3, dtype=int)},
        {"bias": ones(4)}, {"mask": ones(3, dtype=bool)}, {"z_loss": -1.0},
        {"label_smoothing": 1.1}, {"softcap": -1}, {"chunk_size": 0},
    ],
    "expert_mlp": [
        {"x": ones(3)}, {"experts": ones(3, 2, dtype=int)}, {"experts": ones(4, dtype=int)},
        {"experts": 4 + ones(4, 2, dtype=int)}, {"experts": -ones(4, 2, dtype=int)},
        {"weights": ones(4, 1)}, {"gate": ones(3, 6)}, {"gate": ones(5, 6, 3)},
        {"gate": ones(5, 3, 6), "transposed": True}, {"up": ones(5, 3, 7)}, {"down": ones(5, 3, 6)},
        {"activation": "relu6"},
    ],
    "fp8_linear": [
        {"x": ones(4, 2)}, {"x": ones()}, {"x": ones(4, 3), "kernel": ones(3)},
        {"x": ones(4, 3), "transposed": True},
    ],
    "sync_batch_norm": [
        {"scale": ones(4)}, {"residual": ones(4, 5)}, {"epsilon": 0}, {"activation": "gelu"},
        {"stats": ones(900)}, {"feature_axis": 3}, {"feature_axis": ()}, {"axis_name": "i"},
        {"axis_name": ("i", 0)}, {"axis_index_groups": [[0], [1]]},
    ],
    "batch_norm_inference": [{"epsilon": -1}],
    "bn_relu_conv": [
        {"x": [X, X[:, :2]]}, {"x": X[0]}, {"scale": ones(5)}, {"kernel": ones(1, 1, 5, 4)},
        {"chunk_size": 0},
    ],
    "dense_block": [
        {"x": IMAGE[0]}, {"params": make_params(2, channels=2, dtype=np.float32)},
        {"save": "nothing"}, {"dropout_rate": 1.0}, {"mask": IMAGE > 0},
    ],
    "deform_conv2d": [
        {"x": X[0]}, {"x": X[:, :0]}, {"x": X, "kernel_dilation": 3}, {"kernel": ones(3, 3, 5, 4)},
        {"offset": ones(2, 5, 4, 18)}, {"offset_groups": 3}, {"mask": ones(2, 3, 2, 18)},
        {"bias": ones(5)}, {"strides": (1, 2, 3)}, {"padding": "full"}, {"padding": (1, 2, 3)},
        {"implementation": "cuda"},
    ],
    "ms_deform_attn": [
        {"value": ones(2, 6, 3, 4)}, {"spatial_shapes": ((0, 3), (1, 7))},
        {"sampling_locations": ones(2, 5, 3, 2, 4)}, {"attention_weights": ones(2, 5, 3, 2, 2)},
        {"implementation": "cuda"},
    ],
    "dcn_aggregate": [
        {"x": X[0]}, {"mask": ones(2, 3, 2, 16)}, {"offset": ones(2, 3, 2, 18)},
        {"offset_groups": 3}, {"remove_center": True, "kernel_size": (2, 3)},
        {"offset_scale": np.inf},
    ],
    "roi_align": [
        {"x": X[0]}, {"boxes": ones(2, 3, 5)}, {"boxes": ones(1, 3, 4)}, {"spatial_scale": 0.0},
        {"sampling_ratio": -2},
    ],
    "deform_roi_pool": [{"offset": ones(2, 3, 2, 2, 3)}],
    "deform_psroi_pool": [{"offset": ones(2, 3, 2, 2, 6)}, {"group_size": 3}],
    "multiscale_roi_align": [{"features": [X, X[..., :7]]}, {"spatial_scales": (0.5, 0.3)}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "name", "args"),
    [
        (error, name, args)
        for error, table in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES))
        for name, wrong in table.items()
        for args in wrong
    ],
)
def test_rejects_bad_arguments(error, name, args):
    with pytest.raises(error, match=rf"\b{next(iter(args))}\b") as raised:
        call(name, args)
    assert len(str(raised.value)) < 400  # long values are shortened


@pytest.mark.parametrize(
    "args", [{"kernel": ones(4, 8, 3, 3)}, {"x": np.moveaxis(X, -1, 1)}], ids=["kernel", "x"]
)
def test_pytorch_layouts_point_to_compat(args):
    with pytest.raises(ValueError, match="NHWC.*HWIO.*effjax.compat"):
        call("deform_conv2d", args)


def test_sizes_are_known_while_tracing():
    with pytest.raises(TypeError, match="`spatial_shapes` must be an integer, not a traced array"):
        jax.jit(lambda shapes: call("ms_deform_attn", {"spatial_shapes": shapes}))(ones(2, 2))


def test_pixels_are_counted_in_32_bits():
    image = jax.ShapeDtypeStruct((2, 2**16, 2**15, 8), "float32")
    with pytest.raises(ValueError, match="`x` must have 1 to"):
        jax.eval_shape(lambda x: call("deform_conv2d", {"x": x}), image)


def test_array_is_described():
    text = re.escape("`epsilon` must be a number, not an array float32[2, 3].")
    with pytest.raises(TypeError, match=text):
        call("sync_batch_norm", {"epsilon": ones(2, 3)})


def assert_same_program(name, options, same):
    programs = [
        str(jax.make_jaxpr(lambda o=o: getattr(effjax, name)(**GOOD[name] | o))())
        for o in (options, same)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize(
    ("name", "options", "same"),
    [
        ("deform_conv2d", {"padding": "valid"}, {"padding": ((0, 0), (0, 0))}),
        ("deform_conv2d", {"padding": [(0, 0), [0, 0]]}, {"padding": "VALID"}),
        ("deform_conv2d", {"padding": np.zeros((2, 2), int)}, {"padding": "VALID"}),
        ("deform_conv2d", {"strides": np.array([1, 1])}, {"strides": jnp.int32(1)}),
        ("bn_relu_conv", {"padding": (1, 2)}, {"padding": ((1, 1), (2, 2))}),
        ("sync_batch_norm", {"epsilon": jnp.int32(2)}, {"epsilon": 2.0}),
    ],
)
def test_options_in_other_forms(name, options, same):
    assert_same_program(name, options, same)


@pytest.mark.parametrize(
    ("padding", "pads"), [("SAME", ((1, 1), (1, 2))), ("SAME_LOWER", ((1, 1), (2, 1)))]
)
def test_padding(padding, pads):
    """Names of paddings depend on the size of the image, the kernel and its dilation."""
    args = {"kernel": ones(3, 2, 8, 4), "mask": None, "kernel_dilation": (1, 3), "padding": pads}
    rows, columns = (n + sum(p) for n, p in zip((3, 1), pads, strict=True))
    args["offset"] = ones(2, rows, columns, 12)
    assert_same_program("deform_conv2d", args | {"padding": padding}, args)


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(0), np.array([0, 0], np.uint32)])
def test_keys(key):
    def run(key):
        return effjax.dense_block(**GOOD["dense_block"], key=key, dropout_rate=0.5)[0]

    np.testing.assert_allclose(run(key), jax.jit(run)(KEY), atol=1e-5)


def test_object_with_jax_array_method():
    class Parameter:
        def __jax_array__(self):
            return jnp.ones(5)

    assert effjax.sync_batch_norm(ones(4, 3, 5), Parameter())[0].shape == (4, 3, 5)


@pytest.mark.parametrize("convert", [list, np.array, jnp.asarray])
def test_sizes_of_levels_as_arrays(convert):
    args = GOOD["ms_deform_attn"] | {"spatial_shapes": convert([[2, 3], [1, 1]])}
    assert effjax.ms_deform_attn(**args).shape == (2, 5, 12)
