"""Comparison of RT-DETR with that of transformers: predictions, gradients and files."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch", reason="requires PyTorch")
transformers = pytest.importorskip("transformers", reason="requires transformers")

from transformers.models.rt_detr import modeling_rt_detr  # noqa: E402
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2  # noqa: E402

from effjax.convert import load_detector, save_detector, to_torch  # noqa: E402
from effjax.convert.tables import RT_DETR, update_name  # noqa: E402
from effjax.models import RTDetrConfig  # noqa: E402
from effjax.models.detection import DenoisingQueries  # noqa: E402
from tests.convert.detectors import CONFIGS, make_denoising, make_images  # noqa: E402

configs = pytest.mark.parametrize("name", CONFIGS)
IMAGES, LARGE = make_images(2, 64, 96, 3), make_images(1, 192, 224, 3)

# The published sizes: what differs from the defaults of transformers. v2 has the same ones.
_BACKBONE = dict(model_type="rt_detr_resnet", out_features=["stage2", "stage3", "stage4"])
_BASIC = _BACKBONE | dict(layer_type="basic", hidden_sizes=[64, 128, 256, 512])
_R34 = dict(
    model_type="rt_detr", num_labels=80, backbone_config=_BASIC, decoder_layers=4,
    encoder_in_channels=[128, 256, 512], hidden_expansion=0.5,
)  # fmt: skip
_R18 = _R34 | dict(decoder_layers=3, backbone_config=_BASIC | dict(depths=[2, 2, 2, 2]))
PUBLISHED: dict[str, dict] = {
    "r18vd": _R18,
    "r34vd": _R34,
    "r50vd": dict(model_type="rt_detr", num_labels=80, backbone_config=_BACKBONE),
    "r101vd": dict(
        model_type="rt_detr", num_labels=80, backbone_config=_BACKBONE | dict(depths=[3, 4, 23, 3]),
        encoder_hidden_dim=384, encoder_ffn_dim=2048, decoder_in_channels=[384] * 3,
    ),
    "v2 r18vd": _R18 | dict(model_type="rt_detr_v2"),
}  # fmt: skip


@functools.cache
def make_transformers(name):
    """Return a model of transformers with random weights and statistics."""
    settings = (CONFIGS | PUBLISHED)[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForObjectDetection.from_config(
        transformers.AutoConfig.for_model(**settings)
    )
    for key, array in model.named_parameters():
        is_small = "embed" in key or array.ndim == 1
        array.data.normal_(std=0.1 if is_small else array[0].numel() ** -0.5)
    for key, array in model.state_dict().items():
        is_norm = "norm" in key or "_proj" in key
        if is_norm and array.ndim == 1 and key.endswith(("weight", "var")):
            array.uniform_(0.5, 1.5)
    return model.double()


def load(folder, name, **options):
    make_transformers(name).save_pretrained(folder)
    return load_detector(folder, param_dtype=jnp.float64, **options)


def run_transformers(model, monkeypatch, denoising):
    """Return the results of a forward pass, with the given denoising queries in training."""
    labels, boxes, mask = denoising
    bias = np.where(mask, 0.0, -np.inf)

    def make_group(targets, class_embed, **_):
        embedded = class_embed(torch.from_numpy(labels).long())
        return embedded, torch.from_numpy(boxes), torch.from_numpy(bias), None

    for module in (modeling_rt_detr, modeling_rt_detr_v2):
        monkeypatch.setattr(module, "get_contrastive_denoising_training_group", make_group)
    images = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    return model.model(images, labels=[] if model.training else None)


def flatten(output):
    """Return the predictions of all layers as they are in transformers."""
    layers = [
        [jnp.concatenate(parts, 1) for parts in zip(*pair, strict=True)]
        for pair in zip(output.denoising, output.layers, strict=True)
    ] if output.denoising else output.layers  # fmt: skip
    logits, boxes = (jnp.stack(parts, 1) for parts in zip(*layers, strict=True))
    return dict(logits=logits, boxes=boxes, enc_logits=output.encoder.logits,
                enc_boxes=output.encoder.boxes)  # fmt: skip


def flatten_theirs(output):
    return dict(
        logits=output.intermediate_logits, boxes=output.intermediate_reference_points,
        enc_logits=output.enc_topk_logits, enc_boxes=output.enc_topk_bboxes,
    )  # fmt: skip


def assert_close(got, want, tolerance=1e-9):
    for key, array in want.items():
        array = array.detach().numpy()
        limit = tolerance * max(1, abs(array).max())
        np.testing.assert_allclose(got[key], array, 0, limit, err_msg=key)


@configs
def test_predictions(name, tmp_path, monkeypatch, x64):
    model, theirs = load(tmp_path, name), make_transformers(name).eval()
    model.eval()
    got = flatten(nnx.jit(lambda model, x: model(x))(model, IMAGES))
    want = flatten_theirs(run_transformers(theirs, monkeypatch, make_denoising(7, 3)))
    assert got["logits"].dtype == np.float64 and got["logits"].shape == (2, 2, 7, 3)
    assert_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name, tmp_path, x64):
    model, theirs = load(tmp_path, name), make_transformers(name).eval()
    model.eval()
    with torch.no_grad():
        want = theirs(torch.from_numpy(LARGE).permute(0, 3, 1, 2))
    got = nnx.jit(lambda model, x: model(x))(model, LARGE).layers[-1]
    assert_close(got._asdict(), dict(logits=want.logits, boxes=want.pred_boxes))


@configs
def test_training_step(name, tmp_path, monkeypatch, x64):
    """Predictions, gradients and running statistics with denoising queries."""
    model, theirs = load(tmp_path, name), make_transformers(name).train()
    before = {key: array.clone() for key, array in theirs.state_dict().items()}
    denoising = make_denoising(7, 3)
    want = flatten_theirs(run_transformers(theirs, monkeypatch, denoising))
    rng = np.random.default_rng(2)
    factors = {key: rng.normal(size=array.shape) for key, array in want.items()}
    theirs.zero_grad()
    sum((torch.from_numpy(factors[key]) * array).sum() for key, array in want.items()).backward()

    @nnx.jit
    def step(model, images):
        def loss(model):
            got = flatten(model(images, DenoisingQueries(*denoising)))
            return sum((factors[key] * got[key]).sum() for key in got), got

        return nnx.grad(loss, has_aux=True)(model)

    grads, got = step(model, IMAGES)
    assert_close(got, want)
    ours = to_torch(grads, RT_DETR, prefix="model")
    for key, array in theirs.named_parameters():
        if key.startswith("model."):
            key, grad = update_name(key, RT_DETR), ours.pop(update_name(key, RT_DETR))
            tolerance = 1e-9 * max(1, abs(grad).max())
            np.testing.assert_allclose(grad, array.grad, 0, tolerance, err_msg=key)
    is_frozen = model.config.freeze_backbone_batch_norms
    assert all("backbone" in key and not array.any() for key, array in ours.items())
    assert bool(ours) == is_frozen
    stats = to_torch(model, RT_DETR, prefix="model")
    for key, array in theirs.state_dict().items():
        if "running" in key:
            np.testing.assert_allclose(stats[update_name(key, RT_DETR)], array, 1e-6, 1e-6)
    theirs.load_state_dict(before)


@configs
def test_files(name, tmp_path, x64):
    """Transformers loads what effjax saves, and the reverse; both read each other's config.json."""
    model, theirs = load(tmp_path / "theirs", name), make_transformers(name)
    names = ["a", "b", "c"]
    save_detector(model, tmp_path / "ours", id2label=names)
    loaded, info = transformers.AutoModelForObjectDetection.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()) and type(loaded) is type(theirs)
    want, got = theirs.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys() and loaded.dtype == torch.float64
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array, err_msg=key)
    assert [loaded.config.id2label[i] for i in range(3)] == names
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert RTDetrConfig.from_dict(settings) == model.config == RTDetrConfig.from_dict(CONFIGS[name])
    assert load_detector(tmp_path / "ours").config.id2label == tuple(names)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "ours")
    image = np.arange(240, dtype=np.uint8).reshape(8, 10, 3)
    pixels = processor(image, return_tensors="np", do_resize=False)["pixel_values"]
    np.testing.assert_allclose(pixels[0].transpose(1, 2, 0), image / 255, 1e-6)


@configs
def test_backbone_on_odd_sizes(name, tmp_path, x64):
    model, theirs = load(tmp_path, name), make_transformers(name).eval()
    model.eval()
    images = IMAGES[:, :50, :71]
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    want = theirs.model.backbone.model(pixels).feature_maps
    got = nnx.jit(lambda m, x: m.features(x))(model.backbone, images)
    for ours, array in zip(got[1:], want, strict=True):
        np.testing.assert_allclose(ours, array.detach().permute(0, 2, 3, 1), 0, 1e-9)


def test_defaults():
    for config in (transformers.RTDetrConfig(), transformers.RTDetrV2Config()):
        settings = json.loads(config.to_json_string(use_diff=False))
        assert RTDetrConfig.from_dict(settings) == RTDetrConfig(model_type=config.model_type)


def test_other_classes(tmp_path, x64):
    """Heads of classes are initialized as in transformers, and the others are kept."""
    name = "v1, basic"
    with pytest.warns(UserWarning, match="`num_classes` .=5. differs from the 3 classes"):
        model = load(tmp_path, name, num_classes=5)
    got, want = to_torch(model, RT_DETR, prefix="model"), make_transformers(name).state_dict()
    new = ("denoising_class_embed", "enc_score_head", "class_embed")
    for key, array in want.items():
        array = np.asarray(array)
        saved = got.get(update_name(key, RT_DETR))
        if not any(part in key for part in new) and saved is not None:
            np.testing.assert_allclose(saved, array, 1e-6)
    assert got["model.decoder.class_embed.1.weight"].shape == (5, 16)
    np.testing.assert_allclose(got["model.enc_score_head.bias"], -np.log(5), 1e-6)
    assert got["model.denoising_class_embed.weight"].std() > 0.1
