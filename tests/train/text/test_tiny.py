import sys

import pytest

from effjax.train.text.tiny import main, write_checkpoint


def test_writes_a_checkpoint_and_rows(tmp_path):
    pytest.importorskip("tokenizers")
    assert main([str(tmp_path / "tiny")]) is None
    names = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "rows.jsonl"} <= names


def test_the_model_has_the_tokens_of_the_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="`vocab_size` .=259. must be at least 260"):
        write_checkpoint(tmp_path / "small", vocab_size=259)
    # The text has fewer pairs of tokens than this.
    model = write_checkpoint(tmp_path / "large", vocab_size=10**6)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "large" / "tokenizer.json"))
    assert 384 < model.vocab_size == tokenizer.get_vocab_size() < 10**6


def test_a_missing_package_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "tokenizers is missing. Run " in main([str(tmp_path / "tiny")])
    assert not list(tmp_path.iterdir())


def test_does_not_overwrite(tmp_path):
    (tmp_path / "file").touch()
    assert main([str(tmp_path)]) == f"{tmp_path} exists and is not empty. Give another folder."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
