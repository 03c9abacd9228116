"""The benchmarks run, compare equal results, and write down what they measured."""

import dataclasses
import functools
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

from effjax.bench import (
    batch_norm,
    cross_entropy,
    deform_attention,
    deform_conv,
    dense_block,
    figure,
    h200_models,
    import_time,
    memory,
    offload,
    offload_peers,
    resnet,
    roi,
)
from effjax.bench._offload_forms import (
    FUSED,
    FUSED_IN_MEMORY,
    IN_MEMORY,
    REMAT,
    Setting,
    make_params,
    step_of,
)
from effjax.models import TransformerLM
from effjax.native import available
from effjax.ops.offload.compiled import offload_jit
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr("sys.argv", ["some.py", "--rounds", "1"])


def rows_of(path):
    record = json.loads(path.read_text())
    assert record["command"] == "python -m effjax.bench.some --rounds 1"
    assert record["versions"]["jax"] == jax.__version__
    return {row["name"]: row for row in record["rows"]}


@pytest.mark.exhaustive
def test_import_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(import_time, "IMPORTS", ("jax", "effjax"))
    import_time.main(rounds=1, json=tmp_path)
    alone, added = rows_of(tmp_path / "import_time.json").values()
    assert (alone["name"], added["name"]) == ("import jax", "import effjax, after jax")
    assert added["modules"] < alone["modules"] / 3 and added["seconds_quartiles"][0] > 0


def test_dense_block(tmp_path, capsys):
    dense_block.main(
        layers=[1], batch_size=2, image_size=6, growth_rate=2, channels=3, rounds=1, json=tmp_path
    )
    rows = rows_of(tmp_path / "dense_block_1_float32.json")
    assert set(rows) == set(dense_block.BLOCKS)
    assert rows["plain autodiff"]["ratio"] == 1
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert "pass-through" in capsys.readouterr().out


@pytest.mark.parametrize("backward", [exhaustive(False), True])
def test_roi(backward):
    case = roi.Case(2, boxes=4, channels=2, height=64, width=96)
    rows = {row["name"]: row for row in roi.bench_case(case, backward, rounds=1)}
    assert {"effjax xla"} <= set(rows)
    assert all(row["difference"] < 1e-4 for row in rows.values())


def test_batch_norm(tmp_path):
    batch_norm.main(batch_size=2, image_size=4, channels=4, rounds=1, json=tmp_path)
    rows = rows_of(tmp_path / "batch_norm_float32.json")
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@pytest.mark.parametrize("backward", [False, True])
def test_deform_conv(backward):
    case = deform_conv.Case(2, 4, 5, 6, 2)
    rows = {row["name"]: row for row in deform_conv.bench_case(case, backward, rounds=1)}
    products = rows.pop("matrix products alone")
    assert products["difference"] is None
    native = {"effjax native"} if available("cpu") else set()
    assert rows.keys() >= {"plain XLA", "effjax xla"} | native
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.parametrize("backward", [exhaustive(False), True])
def test_deform_attention(backward):
    case = deform_attention.Case(5, shapes=((4, 5), (2, 3)), heads=2, channels=3, points=2, batch=2)
    rows = {row["name"]: row for row in deform_attention.bench_case(case, backward, rounds=1)}
    native = {"effjax native"} if available("cpu") else set()
    assert rows.keys() == {"packed gather", "effjax xla"} | native
    assert all(row["difference"] < 1e-5 for row in rows.values())


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_deform_attention_planned(tmp_path, monkeypatch):
    case = deform_attention.Case(50, shapes=((4, 5), (2, 3)), heads=2)
    monkeypatch.setattr(deform_attention, "CASES", (case,))
    deform_attention.main(target="l4", json=tmp_path)
    rows = rows_of(tmp_path / "deform_attention_50_l4.json")
    assert rows["the samples alone"]["temp_bytes"] == 4 * 50 * 2 * 2 * 4 * 32
    assert rows["packed gather"]["temp_bytes"] > rows["the samples alone"]["temp_bytes"]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory(tmp_path, capsys, monkeypatch):
    ours = 'effjax save="features"'
    monkeypatch.setattr(memory, "BLOCKS", {ours: dense_block.BLOCKS[ours]})
    memory.main(layers=[1], depth=0, batch_size=2, target="l4", json=tmp_path)
    assert rows_of(tmp_path / "memory_block_1_l4.json")[ours]["ratio"] == 1
    assert "compiled for l4" in capsys.readouterr().out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_of_every_form(tmp_path, capsys):
    memory.main(layers=[1], depth=10, batch_size=2, target="l4", json=tmp_path)
    rows = rows_of(tmp_path / "memory_block_1_l4.json")
    assert set(rows) == set(dense_block.BLOCKS)
    rows = rows_of(tmp_path / "memory_densenet_10_l4.json")
    assert list(rows) == ["plain", "jax.checkpoint", "effjax conv", "effjax features"]
    assert rows["plain"]["ratio"] == 1
    assert "compiled for l4" in capsys.readouterr().out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_cross_entropy(tmp_path, capsys):
    model = dict(layers=1, width=16, heads=2, vocab_size=512, context=32)
    cross_entropy.main(**model, batch_size=[2], dtype="bfloat16", target="l4", json=tmp_path)
    rows = rows_of(tmp_path / "cross_entropy_512_l4.json")
    assert list(rows) == list(cross_entropy.LOSSES)
    out = capsys.readouterr().out
    assert "language model of 512 tokens, planned for l4" in out
    assert "Sequences of 32 tokens, bfloat16" in out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_resnet(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(resnet.RESNETS, "tiny", dict(bottleneck=True, stage_sizes=(1,)))
    resnet.main("tiny", batch_size=2, image_size=16, num_classes=3, target="l4", json=tmp_path)
    rows = rows_of(tmp_path / "tiny_2_l4.json")
    assert list(rows) == list(resnet.forms("tiny", 3, "bfloat16"))
    assert rows["Flax"]["ratio"] == 1 and "compiled for l4" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("bottleneck", [False, True])
def test_the_resnets_of_the_benchmark_are_alike(monkeypatch, bottleneck):
    """Logits of Flax's layers with effjax's parameters, in the order of their creation."""
    sizes = dict(bottleneck=bottleneck, stage_sizes=(1, 1))
    monkeypatch.setitem(resnet.RESNETS, "tiny", sizes)
    theirs, _, ours, *_ = resnet.forms("tiny", 3, jnp.float32).values()
    x = jax.random.normal(jax.random.key(0), (2, 17, 16, 3))
    shapes, variables = (jax.eval_shape(m.init, jax.random.key(0), x) for m in (theirs, ours))
    draw = lambda a: np.random.default_rng(a.size).normal(size=a.shape).astype(a.dtype)  # noqa: E731
    variables = jax.tree.map(draw, variables)
    blocks = [k for k in variables["params"] if k.startswith("stages")]
    found = {}
    for i, name in enumerate(blocks):
        block = variables["params"][name]
        count = 3 if bottleneck else 2
        inner = {f"Conv_{k}": block[f"conv{k + 1}"] for k in range(count)}
        inner |= {f"BatchNorm_{k}": block[f"norm{k + 1}"] for k in range(count)}
        if "shortcut" in block:
            inner |= {f"Conv_{count}": block["shortcut"]}
            inner |= {f"BatchNorm_{count}": block["shortcut_norm"]}
        found[f"FlaxBlock_{i}"] = inner
    params = variables["params"]
    found |= {"Conv_0": params["stem_conv"], "BatchNorm_0": params["stem_norm"]}
    found |= {"Dense_0": params["classifier"]}
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, shapes["params"])
    got = theirs.apply({"params": found}, x, mutable=["batch_stats"])[0]
    want = ours.apply(variables, x, train=True, mutable=["batch_stats"])[0]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
def test_the_losses_of_the_benchmark_are_alike():
    model = TransformerLM(vocab_size=9, num_layers=1, width=8, num_heads=2, rngs=nnx.Rngs(0))
    step = {
        n: cross_entropy.steps_of(model, f, 2, 32)["model"] for n, f in cross_entropy.LOSSES.items()
    }
    found = {n: jax.jit(f)(params, jnp.ones((2, 33), int)) for n, (f, params, _) in step.items()}
    for got in found.values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, found["plain"])


def test_inputs_are_the_same_in_every_process():
    shapes = {"weights": jax.ShapeDtypeStruct((2, 3), "float32")}
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(b"['weights']"))
    want = 0.02 * abs(jax.random.normal(key, (2, 3)))
    np.testing.assert_array_equal(h200_models.fill(shapes)["weights"], want)


def test_figure(tmp_path):
    for depth in (2, 4):
        rows = [{"name": name, "peak_bytes": depth * 10**9} for name in dense_block.BLOCKS]
        (tmp_path / f"memory_block_{depth}_l4.json").write_text(json.dumps({"rows": rows}))
    figure.main(tmp_path, tmp_path / "new" / "figure.svg", target="l4")
    drawn = (tmp_path / "new" / "figure.svg").read_text()
    assert "plain  4.00 GB" in drawn and "planned for L4" in drawn
    with pytest.raises(typer.BadParameter, match="memory_block_.*_h200.json: run python -m"):
        figure.main(tmp_path, tmp_path / "figure.svg", target="h200")


SMALL_LM = dict(
    width=8, heads=2, context=4, batch_size=2, dtype="float32", dropout=0.0, rounds=1, plan=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("passes", "names"),
    [
        exhaustive("step", ["in memory", "in memory, fused update", "all offloaded, fused update"]),
        exhaustive("gradients", ["in memory, remat, microbatches", "all offloaded"]),
    ],
)
def test_offload(tmp_path, capsys, passes, names, optimized):
    number = 1 + ("in memory, remat, microbatches" in names)
    options = SMALL_LM | dict(layers=2, microbatches=number, target="", depths=[], passes=[passes])
    offload.main(**options, only=names, json=tmp_path)
    rows = rows_of(tmp_path / f"offload_{passes}_2x8_{number}_float32.json")
    assert list(rows) == names and rows[names[0]]["ratio"] == 1
    assert all(row["compared_with"] == names[0] for row in rows.values())
    assert all(row["difference"] < 1e-5 for row in rows.values())
    if passes == "gradients":
        assert rows["all offloaded"]["bit_identical"] is True
    assert names[1] in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="--only 'fused' is not one of .*'in memory'"):
        offload.main(**options, only=["fused"], json=None)


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_offload_planned(tmp_path):
    options = SMALL_LM | dict(layers=0, microbatches=1, target="l4", depths=[2], passes=[])
    offload.main(**options, only=["all offloaded, fused update"], json=tmp_path)
    row = rows_of(tmp_path / "offload_adam_8_float32_l4.json")["all offloaded, fused update"]
    assert row["layers"] == 2 and row["planned_host_bytes"] > 3 * 4 * 2 * 12 * 8**2


TINY = Setting(
    layers=2, width=8, heads=2, context=4, batch_size=2, dropout=0.0, vocab_size=16, mlp_width=12,
)  # fmt: skip
FORMS = offload_peers.peers() | offload_peers.ours()


def losses_of(name):
    """Those of three steps."""
    form = FORMS[name]
    found, step = step_of(TINY, form), offload_jit(step_of(TINY, form).step)
    state, losses = found.init(*make_params(TINY, form.layers)), []
    for _ in range(3):
        state, loss = step(state, TINY.batch(), jax.random.key(0))
        losses.append(float(loss))
    return losses


@functools.cache
def losses_in_memory():
    return losses_of(IN_MEMORY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in FORMS if name != IN_MEMORY])
def test_peers_of_offload_train_alike(name):
    losses = losses_of(name)
    np.testing.assert_allclose(losses, losses_in_memory(), rtol=1e-5)
    assert losses[0] > losses[2]


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_offload_peers(tmp_path, monkeypatch, capsys):
    deeper = dataclasses.replace(TINY, width=64, batch_size=8)
    for name, value in {"MODEL": TINY, "SMALL": TINY, "BRACKET": (1,)}.items():
        monkeypatch.setattr(offload_peers, name, value)
    monkeypatch.setattr(offload_peers, "HOSTS", {1e-3: deeper})
    chosen = IN_MEMORY, REMAT, offload_peers.MOVED, FUSED_IN_MEMORY, FUSED
    monkeypatch.setattr(offload_peers, "peers", lambda: {name: FORMS[name] for name in chosen[:3]})
    monkeypatch.setattr(offload_peers, "ours", lambda: {name: FORMS[name] for name in chosen[3:]})
    offload_peers.main(target=["l4"], json=tmp_path)
    rows = rows_of(tmp_path / "offload_peers_l4.json")
    assert tuple(rows) == chosen and rows[IN_MEMORY]["ratio"] == 1
    assert rows[offload_peers.MOVED]["planned_host_bytes"] > 0
    rows = rows_of(tmp_path / "offload_bracket_gh200.json")
    assert all(row["layers"] == 1 for row in rows.values())
    largest = rows_of(tmp_path / "offload_largest_gh200.json")[FUSED]
    layer = 3 * 4 * 64 * (4 * 64 + 2 * 12 + 2)
    assert largest["planned_host_bytes"] <= largest["host_bytes"] == 10**6
    assert 10**6 - largest["planned_host_bytes"] < 2 * layer
    assert "bracket, planned for gh200" in capsys.readouterr().out


def test_offload_peers_refuses_other_tables():
    with pytest.raises(typer.BadParameter, match="--tables 'x' is not one of .*'largest'"):
        offload_peers.main(tables=["x"])
