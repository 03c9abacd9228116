"""Models by their names on the Hub, from a local server."""

import datetime
import json
import shutil

import pytest

from effjax.train.errors import DataError
from effjax.train.text.base import find_adapter, find_base
from effjax.train.text.model import find_model
from effjax.train.text.sources import read_rows
from tests.train.text.hub import COMMIT, serve, use
from tests.train.text.small import finetune_task

constants = pytest.importorskip("huggingface_hub.constants")
NAME = "effjax-tests/tiny"


@pytest.fixture
def server(base, tmp_path, monkeypatch):
    with serve(("model", NAME, base)) as server:
        use(server, monkeypatch, tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        yield server


def test_trains_and_generates_from_the_hub(server, base, monkeypatch):
    assert find_base(NAME, None, allow_file=True).model == find_base(str(base), None).model
    assert server.downloaded == ["config.json"]  # all that a plan needs
    task = finetune_task(base, checkpoint=NAME)
    # The commit is stored, so that a resumed run reads the same files.
    assert task.config.checkpoint == f"{NAME}@{COMMIT}"
    local = finetune_task(base)
    assert task.base is not None and task.describe()["base"] == local.describe()["base"]
    assert task.digest_base() == local.digest_base()
    assert not {"rows.jsonl"} & set(server.downloaded)
    model = find_model(NAME, None, datetime.date(2026, 1, 31))
    assert str(model.base.repository) == f"{NAME}@{COMMIT}" and model.adapter is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_base(f"{NAME}@{COMMIT}", None).folder == find_base(NAME, None).folder


def test_quantized_models_are_not_downloaded(server, base, tmp_path):
    awq = shutil.copytree(base, tmp_path / "awq")
    config = json.loads((awq / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "awq"}}
    (awq / "config.json").write_text(json.dumps(config))
    server.repositories += (("model", "effjax-tests/tiny-AWQ", awq),)
    with pytest.raises(DataError, match="tiny-AWQ: `quantization_config` .*in full precision"):
        find_base("effjax-tests/tiny-AWQ", None)
    assert server.downloaded == ["config.json"]
    for end in "-unsloth-bnb-4bit", "-bnb-4bit", "-4bit", "_BNB_8bit@main":
        with pytest.raises(DataError, match=f"probably {NAME}.$"):
            find_base(f"{NAME}{end}", None, allow_file=True)
    assert server.downloaded == ["config.json"]


def test_a_folder_has_precedence(server, base, tmp_path):
    shutil.copytree(base, tmp_path / NAME)
    assert find_base(NAME, None).folder == tmp_path / NAME and not server.downloaded


def test_errors_are_one_line(server, monkeypatch):
    with pytest.raises(DataError, match="effjax-tests/other: not found"):
        find_base("effjax-tests/other", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot be reached .HF_HUB_OFFLINE is set"):
        find_base(NAME, None)


def test_data_sets(server, tmp_path, monkeypatch):
    config = pytest.importorskip("datasets").config
    for name in "train", "test":
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}')
    server.repositories += (("dataset", "effjax-tests/rows", tmp_path / "rows"),)
    monkeypatch.setattr(config, "HF_ENDPOINT", server.url)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for name, split in ("", "train"), (":test", "test"), ("@main:default:test", "test"):
        (row,) = read_rows(f"effjax-tests/rows{name}")
        assert row.content == {"text": split}
    with pytest.raises(DataError, match=r"effjax-tests/rows:other: cannot be loaded .* the split"):
        list(read_rows("effjax-tests/rows:other"))


def test_csv(server, tmp_path, monkeypatch):
    """Its cells are texts, as those of a file are."""
    config = pytest.importorskip("datasets").config
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.csv").write_text("prompt,completion,note\n,NA,\n007,1.10,null\n")
    server.repositories += (("dataset", "effjax-tests/cells", tmp_path / "rows"),)
    monkeypatch.setattr(config, "HF_ENDPOINT", server.url)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    assert [row.content for row in read_rows("effjax-tests/cells")] == [
        {"prompt": "", "completion": "NA"},
        {"prompt": "007", "completion": "1.10", "note": "null"},
    ]


@pytest.mark.usefixtures("server")
def test_paths_with_suffixes_are_not_names(tmp_path):
    for find in (lambda name: find_base(name, None), find_adapter):
        with pytest.raises(DataError, match=r"^models/model\.safetensors: not"):
            find("models/model.safetensors")
    assert not [*tmp_path.iterdir()]  # nothing was asked for
