"""`effjax finetune` and `effjax memory finetune`."""

import json
import shutil
import sys

import pytest

from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import memory_choices
from tests.cli.command import one_line
from tests.programs import needs_gpu_compiler
from tests.tiers import vary
from tests.train.text.small import write_base

pytest.importorskip("tokenizers")

SHORT = ["--max-length", "16", "--batch-size", "8", "--steps", "2", "--dtype", "float32"]
ROWS = ["--data", "base/rows.jsonl"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run_finetune(run, base, tmp_path):
    """Run `effjax finetune` in a folder with a checkpoint and rows."""
    shutil.copytree(base, tmp_path / "base")
    return lambda *argv: run("finetune", *argv)


@vary("lora", [False, True])
def test_a_run(run_finetune, tmp_path, lora):
    kind = ["--lora", "2"] if lora else []
    code, out, err = run_finetune("base", *ROWS, *SHORT, *kind, "--out", "here")
    assert (code, err) == (0, "")
    assert "base/rows.jsonl: 36 train and 4 validation sequences of 40 rows" in out
    assert "packed into" in out and "rows of 16 tokens" in out
    assert "llama: 2 layers of width 32, 43168 parameters in bfloat16" in out
    assert "float32, batch 8 × 16, 2 steps, 8 devices: cpu" in out
    assert "step 2/2  loss" in out and "validation loss of the best step, 2" in out
    folder = "here/adapter" if lora else "here/model"
    assert f"written: {folder}" in out
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert (tmp_path / folder / file).exists()
    config = json.loads((tmp_path / "here" / "config.json").read_text())
    assert config["options"]["checkpoint"] == str((tmp_path / "base").resolve())
    assert config["options"]["date"] and set(config["base"]) == {"config_sha256", "weights_sha256"}


def test_counts_of_sequences(base, run_without_training, tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 50}, {"prompt": "p" * 50, "completion": "b"}]
    rows += [{"text": f"row {i}"} for i in range(9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    out = run_without_training(
        "finetune",
        base,
        "--data",
        "rows.jsonl",
        *SHORT,
        "--validation-data",
        "held.jsonl",
        "--no-packing",
    )
    assert "2 rows cut to 16 tokens" in out
    assert "1 row skipped: no token with loss in the first 16" in out
    assert "1 row left out of the train rows: in the validation rows too" in out
    assert "not packed: 9 rows of 16 tokens" in out


def test_resume_with_moved_files(run_finetune, run_without_training, tmp_path):
    run_without_training("finetune", "base", *ROWS, *SHORT, "--out", "here", "--date", "2026-01-02")
    shutil.move(tmp_path / "base", tmp_path / "moved")
    code, _, err = run_finetune("--resume", "here")
    assert code == 2 and one_line(err) and "/base: not found" in err
    code, _, err = run_finetune("--resume", "here", "--lora", "2")
    assert code == 2 and "--lora (=2) cannot change on --resume. The run has None" in err
    moved = "--data", "moved/rows.jsonl", "--steps", "5"
    out = run_without_training("finetune", "moved", "--resume", "here", *moved)
    assert "moved/rows.jsonl: " in out and "5 steps" in out


@pytest.mark.parametrize(
    ("change", "argv", "message"),
    [
        (None, [], "CHECKPOINT is missing. Use effjax finetune CHECKPOINT --data FILE.jsonl"),
        (None, ["base"], "--data is missing"),
        ("offline", ["a/b", *ROWS], "a/b: not found: neither a path nor a model in the cache"),
        (None, ["./Qwen3-8B", *ROWS], "./Qwen3-8B: not found. Give the folder of"),
        (None, ["base/config.json", *ROWS], "base/config.json: is a file. Give the folder"),
        (None, ["base", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (None, ["base", *ROWS, "--batch-size", "3"], "divisible by the number of devices (=8)"),
        (None, ["base", *ROWS, "--date", "today"], "--date (='today') must be like 2026-01-31"),
        (None, ["base", *ROWS, "--out", "base"], "base: not empty and not a run"),
        (None, ["base", *ROWS, "--stop-after", "90"], "--stop-after '90' must be a time, such as"),
        (None, ["base", *ROWS, "--show-ids"], "--show-ids needs --show"),
        ("no tokenizer", ["base", *ROWS], "base/tokenizer.json: cannot be read"),
        ("no weights", ["base", *ROWS], "must contain model.safetensors"),
        ("bad row", ["base", *ROWS], "base/rows.jsonl: line 3: `completion` must be a string"),
        ("no package", ["base", *ROWS], "tokenizers is missing. Run pip install"),
    ],
)
def test_bad_input_is_one_line(run_finetune, tmp_path, monkeypatch, change, argv, message):
    folder = tmp_path / "base"
    if change == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif change == "no weights":
        (folder / "model.safetensors").unlink()
    elif change == "bad row":
        lines = (folder / "rows.jsonl").read_text().splitlines()
        lines[2] = json.dumps({"prompt": "a", "completion": 5})
        (folder / "rows.jsonl").write_text("\n".join(lines))
    elif change == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    elif change == "no package":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, out, err = run_finetune(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["memory", "finetune"], "finetune needs CHECKPOINT"),
        (["memory", "finetune", "nowhere"], "nowhere: not found"),
        (["memory", "lm", "base"], "unexpected extra argument"),
        (["memory", "lm", "--max-length", "8"], "No such option: --max-length"),
        (["memory", "finetune", "base", "--width", "8"], "No such option: --width"),
    ],
)
def test_memory_usage_errors(run, tmp_path, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory(run, base, tmp_path):
    """A plan needs config.json only, and is above the bound of the search for options."""
    shutil.copy(base / "config.json", tmp_path)
    options = "--max-length", "32", "--batch-size", "64", "--only", "jax.checkpoint", "--json"
    code, out, _ = run("memory", "finetune", "config.json", *options)
    (form,) = json.loads(out)["forms"].values()
    config = FinetuneConfig(checkpoint=str(base), max_length=32, batch_size=64)
    min_bytes = memory_choices(config, set()).min_bytes
    assert min_bytes is not None
    kept, _ = min_bytes(activations="device")
    assert code == 0 and 0 < kept < form["plan"]["device"]["temporaries"]


def test_adapter_is_no_checkpoint(run_finetune, tmp_path):
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "adapter" / "adapter_config.json").write_text("{}")
    code, _, err = run_finetune("run/adapter", *ROWS, *SHORT)
    assert code == 2 and one_line(err)
    assert "run/adapter: a LoRA adapter, not a checkpoint. Give the checkpoint that it" in err


@pytest.mark.exhaustive
def test_stop_after(run_finetune, monkeypatch, tmp_path):
    """The run is saved after the first step that ends too late, and can be resumed."""
    monkeypatch.setattr("effjax.cli.training.parse_time", lambda *_: -1.0)
    code, _, err = run_finetune("base", *ROWS, *SHORT, "--stop-after", "1s", "--out", "here")
    assert code == 75 and one_line(err) and "stopped and saved at step 1. Resume with" in err


def test_show(run, base, tmp_path):
    """The tokens with loss are marked, as the step weights them; nothing is trained."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a\tb:", "completion": " yes"}))
    options = "--data", "rows.jsonl", "--validation", "0", "--show", "3", *SHORT
    code, out, err = run("finetune", base, *options)
    assert (code, err) == (0, "") and out.startswith("row 1: 1 sequence, ")
    assert out.splitlines()[1] == "a\\tb:⟦ yes</s>⟧" and not (tmp_path / "runs").exists()
    _, out, _ = run("finetune", base, *options, "--show-ids", "--no-packing")
    assert out.splitlines()[1].endswith("⟦</s>(1)⟧")


def test_warnings(base, run_without_training, tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 50}, {"prompt": "c", "completion": "d" * 50}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run_without_training(
        "finetune", base, "--data", "rows.jsonl", *SHORT, "--validation", "0"
    )
    assert "warning: no token with loss ends a turn or a text" in out
    assert "warning: most rows are cut (2 of 2)" in out
    assert "warning: a batch of 8 rows is more than the data have, 2 rows" in out
