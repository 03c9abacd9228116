import dataclasses
import gc
import json
import resource

import pytest

from effjax.train.checkpoint import Checkpoints
from tests.cli.command import one_line
from tests.tiers import exhaustive

LM = ["--layers", "1", "--width", "8", "--heads", "1", "--context", "8", "--batch-size", "8"]
LM += ["--steps", "3", "--report-every", "2", "--data", "text:text.txt"]


@pytest.fixture
def run_lm(run, tmp_path):
    """Run `effjax train lm` with a small text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    return lambda *argv: run("train", "lm", *argv)


def test_a_run_of_lm(run_lm, tmp_path):
    code, out, err = run_lm(*LM, "--policy", "dots", "--dtype", "bfloat16", "--out", "here")
    assert (code, err) == (0, "")
    assert "text:text.txt: 317 train, 40 validation and 39 test bytes" in out
    assert "batch 8 × 8, 3 steps, 8 devices" in out
    assert "step 2/3  loss" in out and "step 3/3  loss" in out
    for row in ("train loss", "test loss", "bits/byte", "parameters", "tokens/s"):
        assert row in out
    options = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert options["policy"] == "dots" and options["context"] == 8
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final" and final["test_bits_per_byte"] < 9


@pytest.mark.parametrize("compiler", ["missing", exhaustive("installed")])
def test_plan_option(run_lm, monkeypatch, request, compiler):
    from effjax.train.lm.task import LMResult

    numbers = {field.name: 1 for field in dataclasses.fields(LMResult)}
    monkeypatch.setattr("effjax.train.loop.fit", lambda *_: LMResult(**numbers))
    if compiler == "missing":
        monkeypatch.setenv("EFFJAX_COMPILERS", "/dev/null/none")
    else:
        request.getfixturevalue("gpu_compiler")
    code, out, err = run_lm(*LM, "--out", "here")
    assert (code, err) == (0, "") and "bits/byte" in out and "planning" not in out
    code, out, err = run_lm("--resume", "here", "--plan")
    assert code == 0 and "bits/byte" in out and "planning a step for an H200\n" in out
    assert ("not planned: " in out) == (compiler == "missing")
    assert ("device memory on an H200" in out) == (compiler == "installed")


def test_ctrl_c_then_resume_with_other_steps(run_lm, monkeypatch):
    calls = []

    def fit(task, run, progress, resume, *_):
        calls.append((task.config.steps, resume))
        raise KeyboardInterrupt

    monkeypatch.setattr("effjax.train.loop.fit", fit)
    code, _, err = run_lm(*LM, "--out", "here")
    assert code == 130
    assert err == "effjax: interrupted before the first step. Nothing is kept.\n"
    assert run_lm("--resume", "here", "--steps", "5")[0] == 130
    assert calls == [(3, False), (5, True)]


def test_a_full_disk(run_lm, monkeypatch, caplog):
    """Only the error of the run is printed, and not the many that Orbax logs."""

    def save(checkpoints, *arguments, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            write(checkpoints, *arguments, **options)
            checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    limits, write = resource.getrlimit(resource.RLIMIT_FSIZE), Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    code, _, err = run_lm(*LM, "--out", "here")
    assert code == 2 and one_line(err) and "cannot be written to (" in err
    gc.collect()  # asyncio logs what nobody has read
    assert caplog.records == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "text:nowhere"], "nowhere"),
        (["--context", "39"], "bytes are too few for `context` (=39)"),
        (["--heads", "3"], "`width` (=8) must be divisible by 2 · `heads` (=3). Use 6"),
        (["--out", "."], ".: not empty and not a run"),
        (["--resume", ".", "--context", "3"], "--context cannot be combined with --resume"),
    ],
)
def test_bad_input_is_one_line(run_lm, tmp_path, argv, message):
    code, out, err = run_lm(*([] if "--resume" in argv else LM), *argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]
