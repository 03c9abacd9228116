"""Checks of `.ci/run` that need more than a line of shell."""

import argparse
import importlib.metadata
import importlib.resources
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib

README = pathlib.Path(__file__).parent.parent / "README.md"
MAX_WHEEL_BYTES = 20_000_000
CUDA_LIBRARIES = ("libeffjax_cuda12.so", "libeffjax_cuda13.so")
PURE_PYTHON_SOURCES = (".json", ".sh", ".cc", ".cu", ".h", ".cmake")


def print_readme_command(number: int) -> None:
    """Print one of README's two commands, each alone in a bash block."""
    blocks = re.findall(r"^```bash\n(.*?)\n```", README.read_text(), re.M | re.S)
    commands = [b for b in blocks if b.startswith("pip install ") and " && " in b]
    if len(commands) != 2:
        sys.exit(f"README.md must have two `pip install … && …` blocks; it has {commands}")
    print(commands[number - 1])


def check_accuracy(metrics: pathlib.Path) -> None:
    """Check the test accuracy of README's training run."""
    accuracy = json.loads(metrics.read_text().splitlines()[-1])["test_accuracy"]
    if accuracy < 0.96:
        sys.exit(f"the training run reached a test accuracy of {accuracy:.2%}, below 96 %")


def check_spills(log: pathlib.Path) -> None:
    """Check in nvcc's output that no CUDA kernel spills registers to memory."""
    lines = [line for line in log.read_text().splitlines() if "bytes spill stores" in line]
    if not lines or any(" 0 bytes spill stores, 0 bytes spill loads" not in line for line in lines):
        sys.exit("a CUDA kernel spills registers, or none was compiled:\n" + "\n".join(lines))


def check_contents(wheel: pathlib.Path, sdist: pathlib.Path, cuda: pathlib.Path | None) -> None:
    """Check the files and the size of a wheel, and the files of a source distribution.

    The wheel must contain the CUDA libraries. If `cuda` is given, it has none yet, and a release
    adds as many libraries of the size of this one.
    """
    if not re.fullmatch(r"effjax-.*-py3-none-.*\.whl", wheel.name):
        sys.exit(f"{wheel.name} is for one version of Python")
    names = zipfile.ZipFile(wheel).namelist()
    if extra := [n for n in names if n.endswith(PURE_PYTHON_SOURCES) or n.startswith("benchmarks")]:
        sys.exit(f"the wheel has files that only the source distribution needs: {extra}")
    size = wheel.stat().st_size
    if cuda is None:
        if missing := [n for n in CUDA_LIBRARIES if f"effjax/native/{n}" not in names]:
            sys.exit(f"{wheel.name} lacks {missing}")
    else:
        size += len(CUDA_LIBRARIES) * len(zlib.compress(cuda.read_bytes()))
    print(f"{wheel.name}: {size / 1e6:.1f} MB with CUDA kernels")
    if size > MAX_WHEEL_BYTES:
        sys.exit(f"the wheel has more than {MAX_WHEEL_BYTES / 1e6:g} MB")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for needed in ("effjax/py.typed", "effjax/native/deform_conv_cpu.cc", "tests/conftest.py"):
        if not any(name.endswith(f"/{needed}") for name in names):
            sys.exit(f"{sdist.name} lacks {needed}")


def check_installed() -> None:
    """Check that the installed package is complete, and that importing it starts no backend."""
    import jax

    import effjax

    assert importlib.resources.files(effjax).joinpath("py.typed").is_file()
    assert importlib.metadata.version("effjax") == effjax.__version__
    extra = {"flax", "optax", "matplotlib", "sklearn", "typer", "rich"} & set(sys.modules)
    assert not extra, f"import effjax imports {extra}"
    jax.config.update("jax_num_cpu_devices", 2)  # an error once a backend has started
    assert jax.device_count("cpu") == 2
    check_native("loaded", None)


def check_quiet() -> None:
    """Check that a program in this environment prints nothing but its devices."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    program = [sys.executable, "-c", "import jax; print(jax.devices())"]
    done = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    assert not done.stderr, f"jax.devices() prints {done.stderr}"
    print(done.stdout.strip())


def check_native(cpu: str, cuda: str | None) -> None:
    """Check which native libraries load, and that an operator works with or without them."""
    import jax.numpy as jnp

    import effjax
    import effjax.native

    status = effjax.native.status()
    assert status["cpu"].startswith(cpu), status
    assert cuda is None or status["cuda"].startswith(cuda), status
    x, offset, kernel = jnp.ones((1, 4, 4, 2)), jnp.zeros((1, 2, 2, 18)), jnp.ones((3, 3, 2, 1))
    y = effjax.deform_conv2d(x, offset, kernel)
    assert (y == 18).all()
    print("native kernels:", status)


def check_finetune(folder: pathlib.Path) -> None:
    """Fine-tune a tiny model: its loss falls, a killed run ends equal, transformers loads it."""
    base = folder / "base"
    options = ["--max-length", "64", "--epochs", "12", "--report-every", "34"]
    options += ["--learning-rate", "0.01", "--param-dtype", "float32", "--dtype", "float32"]
    effjax = [sys.executable, "-m", "effjax", "finetune"]
    subprocess.run([sys.executable, "-m", "effjax.train.text.tiny", base], check=True)
    command = [*effjax, base, "--data", base / "rows.jsonl", *options, "--out"]
    subprocess.run([*command, folder / "whole"], check=True)

    # Kill a run after a checkpoint between two reports, and resume it.
    killed = folder / "killed"
    process = subprocess.Popen([*command, killed, "--checkpoint-every", "5"])
    while process.poll() is None and not (killed / "checkpoints" / "40").exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    subprocess.run([*effjax, "--resume", killed], check=True)

    reports = [read_reports(folder / name) for name in ("whole", "killed")]
    assert reports[0] == reports[1], reports
    weights = [folder / name / "model" / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes(), "the weights differ"
    losses = [report["validation_loss"] for report in reports[0]]
    assert losses[-1] < losses[0] - 0.2, losses

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "whole" / "model")
    question = [{"role": "user", "content": "2 + 3?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, return_tensors="pt").input_ids
    answer = model.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
    answer = tokenizer.decode(answer)
    print(f"validation losses {losses}, an answer: {answer!r}")
    assert re.match(r"\d \+ \d = \d+<\|im_end\|>", answer), answer  # it learned the form


def read_reports(run: pathlib.Path) -> list[dict]:
    """Return the reports of a run, without what differs between equal runs."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    times = "seconds", "tokens_per_second"
    return [
        {name: value for name, value in line.items() if name not in times}
        for line in lines
        if line["kind"] == "step"
    ]


def main() -> None:
    """Run the check that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    checks.add_parser("readme-command").add_argument("number", type=int)
    checks.add_parser("accuracy").add_argument("metrics", type=pathlib.Path)
    checks.add_parser("spills").add_argument("log", type=pathlib.Path)
    contents = checks.add_parser("contents")
    contents.add_argument("wheel", type=pathlib.Path)
    contents.add_argument("sdist", type=pathlib.Path)
    contents.add_argument("--cuda", type=pathlib.Path, help="One CUDA library.")
    checks.add_parser("installed")
    checks.add_parser("quiet")
    checks.add_parser("finetune").add_argument("folder", type=pathlib.Path)
    native = checks.add_parser("native")
    native.add_argument("--cpu", required=True)
    native.add_argument("--cuda")
    arguments = vars(parser.parse_args())
    {
        "readme-command": print_readme_command,
        "accuracy": check_accuracy,
        "spills": check_spills,
        "contents": check_contents,
        "installed": check_installed,
        "quiet": check_quiet,
        "finetune": check_finetune,
        "native": check_native,
    }[arguments.pop("check")](**arguments)


if __name__ == "__main__":
    main()
