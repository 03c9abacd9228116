import gc
import json
import resource
import signal
from unittest import mock

import pytest

from tests.cli.command import one_line


def options(steps=3, report_every=2, heads=1, context=8, data="text:text.txt"):
    """Return the options of a small run."""
    sizes = f"--layers 1 --width 8 --heads {heads} --context {context} --batch-size 8".split()
    return [
        *sizes, "--steps", str(steps), "--report-every", str(report_every), "--data", data,
    ]  # fmt: skip


LM = options()


@pytest.fixture
def run_lm(run, tmp_path):
    """Run `effjax train lm` with a small text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    return lambda *argv: run("train", "lm", *argv)


def test_a_run_of_lm(run_lm, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("EFFJAX_COMPILERS", "/dev/null/none")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"effjax": "0"}')
    argv = *LM, "--policy", "dots", "--dtype", "bfloat16", "--plan", "--out", "here"
    assert "holds a run" in refused("train", "lm", *argv)
    code, out, err = run_lm(*argv, "--overwrite")
    assert (code, err) == (0, "")
    assert "text:text.txt: 317 train, 40 validation and 39 test bytes" in out
    assert "batch 8 × 8, 3 steps, 8 devices" in out
    assert "step 2/3  loss" in out and "step 3/3  loss" in out
    assert "planning a step for an H200\nnot planned: " in out
    for row in ("train loss", "test loss", "bits/byte", "trained parameters", "tokens/s"):
        assert row in out
    stored = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert stored["policy"] == "dots" and stored["context"] == 8
    final = json.loads((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final" and final["test_bits_per_byte"] < 9


@pytest.mark.exhaustive
def test_plan_option(run_lm, gpu_compiler):
    code, out, err = run_lm(*LM, "--plan")
    assert (code, err) == (0, "") and "device memory on an H200" in out


def test_signals_save_the_run_and_it_resumes(run_lm, when_printed, tmp_path):
    """SIGTERM, then Ctrl-C in the run that resumes with other options."""
    when_printed("step  2/40", lambda: signal.raise_signal(signal.SIGTERM))
    code, _, err = run_lm(*options(steps=40, report_every=1), "--out", "here")
    resume = "Resume with effjax train lm --resume here\n"
    assert (code, err) == (75, f"effjax: stopped and saved at step 2. {resume}")

    when_printed("step  4/30", lambda: signal.raise_signal(signal.SIGINT))
    code, out, err = run_lm("--resume", "here", "--steps", "30", "--on-nan", "skip")
    assert (code, err) == (130, f"effjax: interrupted and saved at step 4. {resume}")
    assert "step  2/30" not in out and "press Ctrl-C again to end now" in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    stored = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert (stored["steps"], stored["on_nan"], stored["width"]) == (30, "skip", 8)


def test_out_of_memory(run_lm, monkeypatch):
    exhausted = RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")
    monkeypatch.setattr("jax.random.key", mock.Mock(side_effect=exhausted))
    code, _, err = run_lm(*LM)
    assert code == 1 and one_line(err)
    assert "out of device memory. Try a smaller --batch-size, or --fit, or --offload all" in err


# A save that fails leaves coroutines of Orbax that nobody awaits, now and then.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk(run_lm, when_printed, caplog):
    """Only the error of the run is printed, and not the many that Orbax logs."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    when_printed("compiling", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1])))
    try:
        code, _, err = run_lm(*LM, "--out", "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and one_line(err) and "cannot be written to (" in err
    gc.collect()  # asyncio logs what nobody has read
    assert caplog.records == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (options(data="text:nowhere"), "nowhere"),
        (options(context=39), "bytes are too few for --context (=39)"),
        (options(heads=3), "--width (=8) must be divisible by 2 · --heads (=3). Use 6"),
        ([*LM, "--out", "."], ".: not empty and not a run"),
        (["--resume", ".", "--out", "b"], "--out cannot be combined with --resume"),
    ],
)
def test_bad_input(run_lm, refused, tmp_path, argv, message):
    assert message in refused("train", "lm", *argv)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]
