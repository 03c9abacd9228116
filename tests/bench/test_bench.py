"""The benchmarks run, compare equal results, and write down what they measured."""

import json

import jax
import pytest

from effjax.bench import batch_norm, dense_block, memory
from tests.programs import needs_gpu_compiler


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr("sys.argv", ["some.py", "--rounds", "1"])


def rows_of(path):
    record = json.loads(path.read_text())
    assert record["command"] == "python -m effjax.bench.some --rounds 1"
    assert record["versions"]["jax"] == jax.__version__
    return {row["name"]: row for row in record["rows"]}


def test_dense_block(tmp_path, capsys):
    dense_block.main(
        layers=[1], batch_size=2, image_size=6, growth_rate=2, channels=3, rounds=1, json=tmp_path
    )
    rows = rows_of(tmp_path / "dense_block_1_float32.json")
    assert set(rows) == set(dense_block.BLOCKS)
    assert rows["plain autodiff"]["ratio"] == 1
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert "pass-through" in capsys.readouterr().out


def test_batch_norm(tmp_path):
    batch_norm.main(batch_size=2, image_size=4, channels=4, rounds=1, json=tmp_path)
    rows = rows_of(tmp_path / "batch_norm_float32.json")
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["effjax.sync_batch_norm"]["kept"] < 2 < rows["Flax BatchNorm"]["kept"]


@needs_gpu_compiler
def test_memory(tmp_path, capsys):
    memory.main(layers=1, depth=10, batch_size=2, target="l4", json=tmp_path)
    rows = rows_of(tmp_path / "memory_block_1_l4.json")
    assert set(rows) == set(dense_block.BLOCKS)
    rows = rows_of(tmp_path / "memory_densenet_10_l4.json")
    assert list(rows) == ["plain", "jax.checkpoint", "effjax conv", "effjax features"]
    assert rows["plain"]["ratio"] == 1
    assert "compiled for l4" in capsys.readouterr().out
