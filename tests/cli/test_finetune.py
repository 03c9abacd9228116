"""`effjax finetune` and `effjax memory finetune`."""

import gc
import json
import re
import resource
import shutil
import signal
from unittest import mock

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
def folder(base, tmp_path):
    """Return the folder of the command, with a checkpoint and rows."""
    shutil.copytree(base, tmp_path / "base")
    return tmp_path


@vary("lora", [False, True])
def test_a_run(run, folder, lora):
    kind = ["--lora", "2"] if lora else []
    code, out, err = run("finetune", "base", *ROWS, *SHORT, *kind, "--out", "here")
    assert (code, err) == (0, "")
    assert "base/rows.jsonl: 36 train and 4 validation sequences of 40 rows" in out
    assert "packed into" in out and "rows of 16 tokens" in out
    assert "llama: 2 layers of width 32, 43168 parameters in bfloat16" in out
    assert "float32, batch 8 × 16, 2 steps, 8 devices: cpu" in out
    assert "step 2/2  loss" in out and "validation loss of the best step, 2" in out
    file = "adapter/adapter_model.safetensors" if lora else "model/model.safetensors"
    written = folder / "here" / file
    assert written.exists() and f"written: here/{written.parent.name}" in out
    config = json.loads((folder / "here" / "config.json").read_text())
    assert config["options"]["checkpoint"] == str((folder / "base").resolve())
    assert config["options"]["date"] and set(config["base"]) == {"config_sha256", "weights_sha256"}


def test_signals_save_the_run_and_it_resumes(run, folder, when_printed):
    """SIGTERM, then Ctrl-C in the run that resumes with other options."""
    when_printed("step  2/40", lambda: signal.raise_signal(signal.SIGTERM))
    often = "--steps", "40", "--report-every", "1", "--out", "here"
    code, _, err = run("finetune", "base", *ROWS, *SHORT[:4], *SHORT[6:], *often)
    resume = "Resume with effjax finetune --resume here\n"
    assert (code, err) == (75, f"effjax: stopped and saved at step 2. {resume}")

    when_printed("step  4/30", lambda: signal.raise_signal(signal.SIGINT))
    changes = "--steps", "30", "--on-nan", "skip"
    code, out, err = run("finetune", "--resume", "here", *changes)
    assert (code, err) == (130, f"effjax: interrupted and saved at step 4. {resume}")
    assert "step  2/30" not in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stored = json.loads((folder / "here" / "config.json").read_text())["options"]
    assert (stored["steps"], stored["on_nan"], stored["max_length"]) == (30, "skip", 16)


def test_out_of_memory(run, folder, monkeypatch):
    exhausted = RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")
    monkeypatch.setattr("jax.random.key", mock.Mock(side_effect=exhausted))
    code, _, err = run("finetune", "base", *ROWS, *SHORT)
    assert code == 1 and one_line(err)
    assert "out of device memory. Try a smaller --batch-size, or --fit, or --params-in host" in err


# A save that fails leaves coroutines of Orbax that nobody awaits, now and then.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(run, folder, when_printed, caplog):
    """Only the error of the run is printed, and not the many that Orbax logs."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    when_printed("compiling", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1])))
    try:
        code, _, err = run("finetune", "base", *ROWS, *SHORT, "--out", "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and one_line(err) and "cannot be written to (" in err
    gc.collect()  # asyncio logs what nobody has read
    assert caplog.records == []


def write_rows(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_counts_of_sequences(base, run_without_training, tmp_path):
    rows = [{"prompt": "a", "completion": "b" * 50}, {"prompt": "p" * 50, "completion": "b"}]
    write_rows(tmp_path / "rows.jsonl", *rows, *({"text": f"row {i}"} for i in range(9)))
    write_rows(tmp_path / "held.jsonl", {"text": "row 8"})
    data = "--data", "rows.jsonl", "--validation-data", "held.jsonl"
    out = run_without_training("finetune", base, *data, *SHORT, "--no-packing")
    assert "2 rows cut to 16 tokens" in out
    assert "1 row skipped: no token with loss in the first 16" in out
    assert "1 row left out of the train rows: in the validation rows too" in out
    assert "not packed: 9 rows of 16 tokens" in out


def test_resume_with_moved_files(refused, folder, run_without_training):
    run_without_training("finetune", "base", *ROWS, *SHORT, "--out", "here", "--date", "2026-01-02")
    shutil.move(folder / "base", folder / "moved")
    assert "/base: not found" in refused("finetune", "--resume", "here")
    err = refused("finetune", "--resume", "here", "--lora", "2")
    assert "here was trained with --lora (=None), not with 2. Resume with the former" in err
    moved = "--data", "moved/rows.jsonl", "--steps", "5"
    out = run_without_training("finetune", "moved", "--resume", "here", *moved)
    assert "moved/rows.jsonl: " in out and "5 steps" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "CHECKPOINT is missing. Use effjax finetune CHECKPOINT --data FILE.jsonl"),
        (["base"], "--data is missing"),
        (["a/b", *ROWS], "a/b: not found: neither a path nor a model in the cache"),
        (["./Qwen3-8B", *ROWS], "./Qwen3-8B: not found. Give the folder of"),
        (["base/config.json", *ROWS], "base/config.json: is a file. Give the folder"),
        (["base", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["base", *ROWS, "--batch-size", "3"], "divisible by the number of devices (=8)"),
        (["base", *ROWS, "--date", "today"], "--date (='today') must be like 2026-01-31"),
        (["base", *ROWS, "--out", "base"], "base: not empty and not a run"),
        (["--resume", ".", "--out", "b"], "--out cannot be combined with --resume"),
        (["base", *ROWS, "--stop-after", "90"], "--stop-after '90' must be a time, such as"),
        (["base", *ROWS, "--show-ids"], "--show-ids needs --show"),
        (["adapter", *ROWS], "adapter: a LoRA adapter, not a checkpoint. Give the checkpoint that"),
        (["no-tokenizer", *ROWS], "tokenizer.json: does not exist"),
        (["no-weights", *ROWS], "must contain model.safetensors"),
        (["base", "--data", "bad.jsonl"], "bad.jsonl: line 2: `completion` must be a string"),
    ],
)
def test_bad_input(refused, folder, monkeypatch, argv, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, missing in (("tokenizer", "tokenizer.json"), ("weights", "model.safetensors")):
        shutil.copytree(folder / "base", folder / f"no-{name}")
        (folder / f"no-{name}" / missing).unlink()
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    write_rows(folder / "bad.jsonl", {"text": "a"}, {"prompt": "a", "completion": 5})
    before = sorted(folder.rglob("*"))
    assert message in refused("finetune", *argv)
    assert sorted(folder.rglob("*")) == before


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
    kept, _ = min_bytes(activations_in="device")
    assert code == 0 and 0 < kept < form["plan"]["device"]["temporaries"]


@pytest.mark.exhaustive
def test_stop_after(run, folder, monkeypatch):
    """The run is saved after the first step that ends too late, and can be resumed."""
    monkeypatch.setattr("effjax.cli.training.parse_time", lambda *_: -1.0)
    argv = "finetune", "base", *ROWS, *SHORT, "--stop-after", "1s", "--out", "here"
    code, _, err = run(*argv)
    assert code == 75 and one_line(err) and "stopped and saved at step 1. Resume with" in err


def test_show(run, base, tmp_path):
    """The first rows of each file, whatever is held out or packed; nothing is trained."""
    shutil.copy(base / "rows.jsonl", tmp_path / "others.jsonl")
    write_rows(tmp_path / "rows.jsonl", {"prompt": "a\tb:", "completion": " yes"}, {"text": "c\n"})
    options = "--data", "others.jsonl", "--data", "rows.jsonl", "--show", "2", *SHORT
    code, out, err = run("finetune", base, *options)
    assert (code, err) == (0, "") and not (tmp_path / "runs").exists()
    # How many tokens a text has depends on the version of Python, whose help trains the tokenizer.
    assert [re.sub(r"\d+ tokens, \d+ with", "n tokens,", line) for line in out.splitlines()] == [
        "others.jsonl: line 1: n tokens, loss", " |0:", "+>ab</s>",
        "others.jsonl: line 2: n tokens, loss", " |1:", "+>abab</s>",
        "rows.jsonl: line 1: n tokens, loss", " |a\tb:", "+> yes</s>",
        "rows.jsonl: line 2: n tokens, loss", " |c", "+>", "+|</s>",
    ]  # fmt: skip
    assert run("finetune", base, *options, "--no-packing", "--validation", "0")[1] == out
    _, out, _ = run("finetune", base, *options, "--show-ids")
    numbers = (re.sub(r"\d+", "n", line) for line in out.splitlines()[-3:])
    assert [*numbers] == ["  n 'c'", "+ n 'Ċ'", "+ n '</s>'"]


def test_warnings(base, run_without_training, tmp_path):
    write_rows(tmp_path / "rows.jsonl", *({"prompt": a, "completion": "b" * 50} for a in "ac"))
    data = "--data", "rows.jsonl", "--validation", "0"
    out = run_without_training("finetune", base, *data, *SHORT)
    assert "warning: no token with loss ends a turn or a text" in out
    assert "warning: most rows are cut (2 of 2)" in out
    assert "warning: a batch of 8 rows is more than the data have, 2 rows" in out
