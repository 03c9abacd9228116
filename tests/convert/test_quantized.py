"""Checkpoints whose weights are quantized while they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from effjax import convert
from effjax.convert import checkpoint
from effjax.models import DecoderConfig, decoder_shapes
from effjax.ops.quantize import FORMATS, quantize
from tests.convert.test_checkpoint import shapes_of
from tests.tiers import vary

# Rows of 96 and 160 values: the last blocks have padding.
MODEL = DecoderConfig(
    model_type="llama", vocab_size=10, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=24,
)  # fmt: skip
NAME = "mlp.down_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    rng = np.random.default_rng(0)
    params = [
        {name: rng.normal(size=a.shape).astype(a.dtype) for name, a in tree.items()}
        for tree in decoder_shapes(MODEL)
    ]
    convert.save_checkpoint(folder, *params, MODEL.to_json())
    return folder, *params


def assert_quantized(got, layers, form):
    """Assert that the arrays are those of the whole stacks, quantized at once."""
    for name, a in layers.items():
        if "_proj" in name:
            pair = jax.jit(quantize, static_argnums=1)(a, form)
            np.testing.assert_array_equal(got.pop(f"{name}.codes"), pair.codes)
            np.testing.assert_array_equal(got.pop(f"{name}.scales"), pair.scales)
        else:
            np.testing.assert_array_equal(got.pop(name), a)
    assert not got


@vary("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("form", FORMATS)
def test_loads_by_rows(saved, monkeypatch, form, kind):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 5000)
    folder, layers, others = saved
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    shapes = decoder_shapes(MODEL, quantize=form)
    progress = []
    loaded = convert.load_checkpoint(
        folder, *(shapes_of(tree, sharding) for tree in shapes),
        progress=lambda *done: progress.append(done),
    )  # fmt: skip
    assert all(a.sharding == sharding for a in loaded[0].values())
    assert_quantized(dict(loaded[0]), layers, form)
    size = sum(a.nbytes for tree in (layers, others) for a in tree.values())
    assert progress[-1] == (size, size) and sorted(progress) == progress


@vary("axis", [2, 1])
def test_loads_shards_along_blocks(saved, axis):
    folder, layers, _ = saved
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    name = "self_attn.o_proj.weight"  # of two blocks in a row
    shapes, others = decoder_shapes(MODEL, quantize="nf4")
    for part in (f"{name}.codes", f"{name}.scales"):
        sharding = NamedSharding(mesh, P(*[None] * axis, "fsdp"))
        shapes[part] = shapes_of({part: shapes[part]}, sharding)[part]
    loaded, _ = convert.load_checkpoint(folder, shapes, others)
    assert not loaded[f"{name}.codes"].sharding.is_fully_replicated
    assert_quantized(dict(loaded), layers, "nf4")
    replicated = NamedSharding(mesh, P())
    shapes |= shapes_of({f"{name}.scales": shapes[f"{name}.scales"]}, replicated)
    with pytest.raises(ValueError, match="must be sharded as its scales are"):
        convert.load_checkpoint(folder, shapes, others)


def test_scales_have_the_dtype_of_the_parameters(saved):
    folder, layers, _ = saved
    name = f"{NAME}.scales"
    shapes, others = decoder_shapes(MODEL, quantize="nf4")
    narrow = {n: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for n, a in shapes.items()}
    shapes |= {n: a for n, a in narrow.items() if n.endswith(".scales")}
    loaded, _ = convert.load_checkpoint(folder, shapes, others)
    want = quantize(layers[NAME].astype(jnp.bfloat16), "nf4").scales
    np.testing.assert_array_equal(loaded[name], want)


def test_errors(saved, tmp_path):
    folder, *_ = saved
    shapes, others = decoder_shapes(MODEL, quantize="nf4")
    wrong = shapes | {
        f"{NAME}.codes": jax.ShapeDtypeStruct((3, 96, 32), jnp.uint8),
        f"{NAME}.scales": jax.ShapeDtypeStruct((3, 96, 1), jnp.float32),
    }
    with pytest.raises(ValueError, match="of another shape: .* not codes of .*96, 32"):
        checkpoint.check_checkpoint(folder, wrong, others)
    for part in ("codes", "scales"):
        alone = {name: a for name, a in shapes.items() if name != f"{NAME}.{part}"}
        with pytest.raises(ValueError, match="must be a part of a quantized weight"):
            convert.load_checkpoint(folder, alone, others)
    arrays = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    with pytest.raises(ValueError, match="`layers` must not be quantized"):
        convert.save_checkpoint(tmp_path / "a", arrays, {}, {})
    with pytest.raises(ValueError, match="`quantize` .='int4'. must be"):
        decoder_shapes(MODEL, quantize="int4")
