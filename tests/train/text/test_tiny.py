import pytest

from effjax.train.text.tiny import main


def test_writes_a_checkpoint_and_rows(tmp_path):
    pytest.importorskip("tokenizers")
    assert main([str(tmp_path / "tiny")]) is None
    names = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "rows.jsonl"} <= names


def test_does_not_overwrite(tmp_path):
    (tmp_path / "file").touch()
    assert main([str(tmp_path)]) == f"{tmp_path} exists and is not empty. Give another folder."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
