"""RT-DETR without PyTorch: recomputation, devices, dtypes and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import ms_deform_attn
from effjax.convert import load_detector, save_detector
from effjax.memory import residual_bytes
from effjax.models import RTDetr, RTDetrConfig
from effjax.models.detection import DenoisingQueries
from tests.convert.detectors import CONFIGS, make_denoising, make_images
from tests.tiers import vary

V1: dict = CONFIGS["v1, basic"] | dict(decoder_layers=1)
IMAGES = make_images(8, 32, 64, 3)


def make_model(settings=V1, **options):
    """Return a model whose heads do not begin at zero."""
    model = RTDetr(RTDetrConfig.from_dict(settings), **options, rngs=nnx.Rngs(3))
    for head in [model.enc_bbox_head, *model.decoder.bbox_embed]:
        kernel = head.layers[-1].kernel
        kernel.set_value(0.3 * jax.random.normal(jax.random.key(4), kernel.shape, kernel.dtype))
    return model


def split(**options):
    """Return the loss `(params, images, denoising) -> (loss, statistics)`, and its parameters."""
    graphdef, params, stats = nnx.split(make_model(**options), nnx.Param, ...)

    def loss(params, images, denoising):
        model = nnx.merge(graphdef, params, stats, copy=True)
        output = model(images, DenoisingQueries(*denoising))
        loss = sum(jnp.mean(jnp.sin(3 * a)) for a in jax.tree.leaves(output))
        return loss, nnx.state(model, nnx.BatchStat)

    return loss, params


def assert_close(got, want, tolerance=1e-10):
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        np.testing.assert_allclose(a, b, 0, tolerance, err_msg=jax.tree_util.keystr(path))


def value_and_grad(loss, params, images, denoising):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, images, denoising)


@functools.cache
def reference():
    loss, params = split(efficient=False, param_dtype=jnp.float64, frozen_norms=False)
    return value_and_grad(loss, params, IMAGES, make_denoising(7, 3, batch=8))


def test_recomputation_changes_nothing(x64):
    loss, params = split(save="features", param_dtype=jnp.float64, frozen_norms=False)
    got = value_and_grad(loss, params, IMAGES, make_denoising(7, 3, batch=8))
    assert_close(got, reference())


def test_recomputation_keeps_less():
    arguments = jnp.float32(IMAGES), make_denoising(7, 3, batch=8)

    def kept(**options):
        loss, params = split(**options)
        return residual_bytes(lambda p: loss(p, *arguments)[0], params).bytes

    plain, conv, features = kept(efficient=False), kept(), kept(save="features")
    assert features < conv < 0.6 * plain


@vary("kind", [AxisType.Explicit, AxisType.Auto])
def test_devices_change_nothing(kind, x64):
    """Eight devices with an image each compute what one does, with norms over all of them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    loss, params = split(param_dtype=jnp.float64, frozen_norms=False)
    labels, boxes, mask = make_denoising(7, 3, batch=8)
    with jax.set_mesh(mesh):
        whole, by_image = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        params, mask = jax.device_put((params, mask), whole)
        images, labels, boxes = jax.device_put((IMAGES, labels, boxes), by_image)
        got = value_and_grad(loss, params, images, (labels, boxes, mask))
    assert_close(got, reference())


def test_frozen_norms(x64):
    """All norms are constants, and evaluation is training."""
    model = make_model(frozen_norms=True, param_dtype=jnp.float64)
    run = nnx.jit(lambda model, x: model(x))
    trained = run(model, jnp.asarray(IMAGES))
    assert not any(np.any(v) for v in jax.tree.leaves(nnx.state(model, _is_mean)))
    model.eval()
    assert_close(run(model, jnp.asarray(IMAGES)), trained)


def _is_mean(path, value):
    return isinstance(value, nnx.BatchStat) and path[-1] == "mean"


def test_bfloat16():
    model = make_model()
    params = nnx.state(model)
    half = make_model(dtype=jnp.bfloat16)
    model.eval(), half.eval()
    want = nnx.jit(lambda model, x: model._encode(x)[0])(model, jnp.float32(IMAGES))
    got = nnx.jit(lambda model, x: (model._encode(x)[0], model(x)))(half, jnp.float32(IMAGES))
    np.testing.assert_allclose(np.float32(got[0]), want, 0, 0.05 * np.abs(want).max())
    assert got[0].dtype == jnp.bfloat16
    assert {a.dtype.name for a in jax.tree.leaves(got[1])} == {"float32"}
    assert {a.dtype.name for a in jax.tree.leaves(params)} == {"float32"}


def test_sampled_points(x64):
    """The weighted sum of the values there is the result of the last layer's attention."""
    model = make_model(
        CONFIGS["v2, bottleneck"], param_dtype=jnp.float64, frozen_norms=True, efficient=False
    )
    attn, seen = model.decoder.layers[-1].encoder_attn, []
    run = type(attn).__call__

    def record(self, query, boxes, memory, shapes):
        seen.append((run(self, query, boxes, memory, shapes), self.value_proj(memory), shapes))
        return seen[-1][0]

    images = jnp.asarray(IMAGES[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(attn), "__call__", record)
        points, weights = model.sampled_points(images)
    want, value, shapes = seen[-1]
    assert points.shape == (2, 7, 2, 3, 2, 2) and weights.shape == points.shape[:-1]
    value = value.reshape(2, -1, 2, 8)
    got = attn.output_proj(ms_deform_attn(value, shapes, points, weights))
    np.testing.assert_allclose(got, want, 0, 1e-10)


REFUSED = [
    ({"model_type": "deformable_detr"}, "`model_type` (='deformable_detr')"),
    *(
        ({name: "other"}, f"`{name}` (='other') of config.json must be")
        for name in (
            "decoder_method", "backbone", "use_timm_backbone", "eval_size", "learn_initial_query",
            "with_box_refine", "use_focal_loss", "dropout", "activation_dropout",
            "attention_dropout",
        )
    ),
    ({"num_feature_levels": 4}, "`num_feature_levels` (=4)"),
    ({"decoder_in_channels": [8, 8, 4]}, "`decoder_in_channels` (=[8, 8, 4])"),
    ({"encoder_in_channels": [8, 16]}, "`encoder_in_channels` (=[8, 16])"),
    ({"feat_strides": [4, 8, 16]}, "`feat_strides` (=[4, 8, 16])"),
    ({"activation_function": "mish"}, "`activation_function` (='mish')"),
    ({"decoder_offset_scale": 0.3}, "`decoder_offset_scale` must be 0.5"),
    ({"encoder_attention_heads": 3}, "`encoder_attention_heads` (=3) must divide"),
    ({"encoder_hidden_dim": 6}, "`encoder_hidden_dim` (=6)"),
    ({"encode_proj_layers": [3]}, "`encode_proj_layers` (=3)"),
    ({"num_queries": 0}, "`num_queries` (=0)"),
    ({"num_queries": 7.5}, "`num_queries` must be an integer"),
    ({"normalize_before": "false"}, "`normalize_before` must be a bool"),
    ({"layer_norm_eps": 0.0}, "`layer_norm_eps` (=0.0) must be positive"),
    ({"id2label": {"1": "a", "2": "b"}}, "`id2label` of config.json"),
    ({"id2label": []}, "`id2label` (=()) must name"),
    ({"initializer_bias_prior_prob": 1.0}, "`initializer_bias_prior_prob` (=1.0)"),
]  # fmt: skip
REFUSED_BACKBONES = [
    *(({name: "other"}, f"`{name}` (='other')") for name in (
        "model_type", "hidden_act", "downsample_in_first_stage"
    )),
    ({"hidden_sizes": [4, 8, 16, 16]}, "`hidden_sizes` (=[4, 8, 16, 16])"),
    ({"out_indices": [2, 4]}, "`out_indices` (=(2, 4))"),
    ({"layer_type": "wide"}, "`layer_type` (='wide')"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    REFUSED + [({"backbone_config": V1["backbone_config"] | c}, m) for c, m in REFUSED_BACKBONES],
)
def test_refuses_configurations(changes, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        RTDetrConfig.from_dict(V1 | changes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 64, 48, 3), "(1, 64, 48, 3) must be [N, H, W, 3], with height and width that are mul"),
        ((1, 64, 64, 4), "(1, 64, 64, 4) must be [N, H, W, 3]"),
        ((64, 64, 3), "(64, 64, 3) must be"),
        ((1, 32, 32, 3), "`num_queries` (=22) must be at most the number of pixels"),
    ],
)
def test_refuses_images(shape, message):
    model = make_model(V1 | {"num_queries": 22})
    with pytest.raises(ValueError, match=re.escape(message)):
        nnx.eval_shape(lambda model: model(jnp.zeros(shape)), model)


def test_refuses_denoising_without_embeddings():
    model = make_model(V1 | {"num_denoising": 0})
    with pytest.raises(ValueError, match="`denoising` needs a configuration"):
        nnx.eval_shape(lambda m: m(IMAGES, DenoisingQueries(*make_denoising(7, 3, batch=8))), model)


def test_files(tmp_path):
    """Without transformers; damaged files are named."""
    model = make_model()
    with pytest.raises(ValueError, match="must name the 3 classes of the model, not 2"):
        save_detector(model, tmp_path, id2label=["a", "b"])
    bias = model.enc_score_head.bias
    bias[...] = bias[...].at[0].set(np.nan)
    with pytest.raises(ValueError, match=r"enc_score_head\.bias has numbers that are not finite"):
        save_detector(model, tmp_path)
    assert not [*tmp_path.iterdir()]
    bias[...] = bias[...].at[0].set(0)
    save_detector(model, tmp_path)
    loaded = load_detector(tmp_path)
    assert loaded.config == model.config
    assert_close(nnx.state(loaded), nnx.state(model), 0)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a config.json"):
        load_detector(tmp_path)
