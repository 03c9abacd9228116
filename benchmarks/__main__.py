"""The benchmarks' command: `python -m benchmarks deform-conv roi --out DIR`."""

import argparse
import importlib
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from .plots import draw, save
from .results import (
    Result,
    Size,
    UnavailableError,
    as_markdown,
    headline,
    machine,
    print_table,
    versions,
    write_json,
)

# Each subject is a file of this folder whose `run(size)` yields a `Result` per table.
SUBJECTS = {
    "batch-norm": "batch norm with ReLU and Flax's: time, bytes kept",
    "batch-norm-layers": "planned memory of layers with batch norm, in one program and in a loop",
    "sync-batch-norm": "batch norm over 1 to 8 simulated devices and Flax's: all-reduces, error",
    "dense-block": "time of a dense block, autodiff, Flax, jax.checkpoint and PyTorch",
    "depth": "memory of a dense block by its depth, kept and planned",
    "densenet": "planned memory of a training step of a DenseNet",
    "deform-conv": "deformable convolution, torchvision and plain XLA: time",
    "deform-attention": "deformable attention and a packed gather: time and planned memory",
    "roi": "roi_align over a feature pyramid and torchvision's: time",
    "gpu-sampling": "modelled time of the samplers on a GPU, CUDA kernels and plain XLA",
    "offload": "a language model in memory, recomputed and offloaded: time and planned memory",
    "offload-peers": "planned memory of offloading, JAX's policies and MaxText's way",
    "overlap": "modelled time of an offloaded layer and the best that its copies allow",
    "clipping": "modelled time of clipping by the norm of all gradients, in two forms of a step",
    "language-model": "planned memory of Qwen3-8B with embedding and head in host memory",
    "language-model-table": "planned memory and modelled time of fine-tuning 8B to 70B on a GPU",
    "packed-rows": "modelled time of fine-tuning on packed rows and on rows without segments",
    "finetune": "planned memory and modelled time of effjax finetune by GPU",
    "finetune-quantized": "planned memory and modelled time of adapters on a quantized base",
    "trl": "losses of ten steps of TRL's trainer and of effjax finetune",
    "torch-loop": "losses of a plain PyTorch loop and of effjax finetune, of a real model",
    "published": "modelled time of training steps beside speeds that others measured",
    "published-tpu": "products of a training step on a TPU beside the time that MaxText measured",
    "published-memory": "planned memory of programs beside the memory that others printed",
    "run-memory": "resident memory of a run on the CPU by phase, and the expected one",
    "checkpoint-memory": "host memory beyond a state on the host while Orbax saves and restores it",
    "optimizers": "test loss of a small model with low-precision optimizers",
    "optimizers-offload": "planned steps with a master copy of 24 bits and with Muon",
    "optimizers-memory": "planned memory of the update of a large matrix by optimizer",
    "planner": "seconds of a plan by the depth of the model",
    "cross-entropy": "planned memory of the gradients of a large vocabulary",
    "fit": "options chosen for several budgets of memory, and one setting for all of them",
    "import-time": "what importing effjax and its operators adds to importing jax",
    "resnet": "planned memory of a training step of a ResNet and of Flax's layers",
    "tpu": "planned memory and all-reduces on a TPU, and those of plain JAX",
    "tpu-offload": "planned memory of a training step on a TPU, recomputed and offloaded",
    "tpu-sampling": "planned memory and memory traffic of the samplers on a TPU",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure effjax and its peers in one process, program after program.",
    )
    parser.add_argument("names", nargs="*", metavar="all|NAME", help="Names, as --list shows them.")
    parser.add_argument("--list", action="store_true", help="Name the benchmarks and run none.")
    parser.add_argument("--out", type=Path, help="Folder for JSON, pictures and summary.md.")
    parser.add_argument(
        "--size",
        choices=["small", "published"],
        default="small",
        help="small: minutes on a laptop. published: the settings of docs/measured.",
    )
    options = parser.parse_args(argv)
    if options.list:
        width = max(map(len, SUBJECTS))
        for name, description in SUBJECTS.items():
            print(f"{name:{width}}  {description}")
        return 0
    names = list(SUBJECTS) if "all" in options.names else list(dict.fromkeys(options.names))
    if not names:
        parser.error("name a benchmark, or all; --list shows the names")
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"{unknown[0]!r} is not one of all, {', '.join(SUBJECTS)}")
    if options.out is None:
        parser.error("--out is missing: the folder to write to")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "summary.md").touch()
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror or error}")
    arguments = sys.argv[1:] if argv is None else argv
    return run_all(
        names, options.size, Report(options.out, f"python -m benchmarks {shlex.join(arguments)}")
    )


def run_all(names: Sequence[str], size: Size, report: "Report") -> int:
    """Run benchmarks one after the other; return the exit code.

    A benchmark that cannot run on this machine is skipped with its reason. The exit code is 1 if
    one failed, and 130 after Ctrl-C, which keeps all tables measured before.
    """
    code = 0
    for i, name in enumerate(names, 1):
        start = time.perf_counter()
        print(f"[{i}/{len(names)}] {name}: {SUBJECTS[name]}")
        try:
            for result in results_of(name, size):
                report.add(name, result)
        except KeyboardInterrupt:
            print(f"interrupted in {name}")
            code = INTERRUPTED
            break
        except Exception as error:
            report.add_error(name, error)
        print(f"{name}: {time.perf_counter() - start:.0f} s\n")
    report.write()
    print("\n".join(report.lines))
    print(f"written to {report.folder}: summary.md, and a JSON file and a picture of each table")
    return code or int(report.failed)


def results_of(name: str, size: Size) -> Iterator[Result]:
    """Import and run one benchmark."""
    yield from importlib.import_module(f".{name.replace('-', '_')}", __package__).run(size)


class Report:
    """The output folder: JSON and a picture for each table, and a summary of all."""

    def __init__(self, folder: Path, command: str):
        self.folder, self.command = folder, command
        self.sections: list[str] = []
        self.lines: list[str] = []
        self.failed = False

    def add(self, name: str, result: Result) -> None:
        print_table(result)
        write_json(result, self.folder, self.command)
        text = as_markdown(result)
        if (figure := draw(result)) is not None:
            save(figure, self.folder / f"{result.name}.svg")
            text += f"\n![{result.title}]({result.name}.svg)\n"
        self.sections.append(text)
        self.lines.append(f"{name}: {headline(result)}")
        self.write()

    def add_error(self, name: str, error: Exception) -> None:
        missing = isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(
            ("effjax", "benchmarks")
        )
        if isinstance(error, UnavailableError):
            line = f"{name}: skipped, {error}"
        elif missing:
            line = f"{name}: skipped, {error}; run pip install '.[train]'"
        else:
            self.failed = True
            log = self.folder / f"{name}.log"
            log.write_text("".join(traceback.format_exception(error)))
            first = (str(error).strip() or "no message").splitlines()[0][:200]
            line = f"{name}: FAILED, {type(error).__name__}: {first} (see {log.name})"
        print(line)
        self.lines.append(line)

    def write(self) -> None:
        """Write summary.md."""
        packages = versions()
        device, python = packages.pop("device"), packages.pop("python")
        cpu = machine()
        head = [
            "# Benchmarks of effjax",
            "",
            f"`{self.command}`",
            "",
            f"{cpu['cpu']}, {cpu['threads']} of {cpu['cores']} cores; {device}; Python {python}, "
            f"{', '.join(f'{name} {version}' for name, version in packages.items())}.",
            "",
            *(f"- {line}" for line in self.lines),
            "",
        ]
        (self.folder / "summary.md").write_text("\n".join([*head, *self.sections]))


if __name__ == "__main__":
    sys.exit(main())
