"""The benchmarks' command: `python -m benchmarks deform-conv roi --out DIR`."""

import argparse
import importlib
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from .results import (
    COLUMNS,
    Result,
    Size,
    UnavailableError,
    as_markdown,
    headline,
    machine,
    make_table,
    print_table,
    versions,
    write_json,
)

# Each subject is a file of this folder whose `run(size)` yields a `Result` per table.
SUBJECTS = {
    "sync-batch-norm": "batch norm and Flax's: time, bytes kept, all-reduces and error by devices",
    "dense-block": "a dense block by its depth, autodiff, Flax, jax.checkpoint, PyTorch",
    "densenet": "planned memory of a training step of a DenseNet",
    "resnet": "planned memory of a training step of a ResNet and of Flax's layers",
    "deform-conv": "deformable convolution, torchvision and plain XLA: time",
    "deform-attention": "deformable attention and a packed gather: time and planned memory",
    "roi": "roi_align over a feature pyramid and torchvision's: time",
    "gpu-sampling": "modelled time of the samplers on a GPU, CUDA kernels and plain XLA",
    "cross-entropy": "planned memory of the gradients of a large vocabulary",
    "expert-mlp": "modelled time and planned memory of a mixture of experts, jax.lax.ragged_dot",
    "offload": "planned memory of offloaded steps, JAX's policies and MaxText's way",
    "fp8": "8-bit products: planned speed of effjax finetune and of a layer, and errors",
    "finetune": "planned memory and modelled time of effjax finetune by GPU, also of adapters",
    "detector": "planned memory, speed and largest batch of effjax train detector",
    "optimizers-memory": "planned memory of the update of a large matrix by optimizer",
    "trl": "losses of ten steps of TRL's trainer and of effjax finetune",
    "published": "plans beside the speeds and the memory that others measured",
    "tpu": "planned memory on a TPU, and that of plain JAX",
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
    parser.add_argument("--out", type=Path, help="Folder for JSON and summary.md.")
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
    print(f"written to {report.folder}: summary.md, and a JSON file of each table")
    return code or int(report.failed)


def results_of(name: str, size: Size) -> Iterator[Result]:
    """Import and run one benchmark."""
    yield from importlib.import_module(f".{name.replace('-', '_')}", __package__).run(size)


class Report:
    """The output folder: JSON for each table, and a summary of all."""

    def __init__(self, folder: Path, command: str):
        self.folder, self.command = folder, command
        self.sections: list[str] = []
        self.lines: list[str] = []
        self.failed = False

    def add(self, name: str, result: Result) -> None:
        print_table(result)
        write_json(result, self.folder, self.command)
        table = as_markdown(make_table(result.rows, COLUMNS))
        self.sections.append("\n\n".join([f"## {result.title}", table, *result.notes, ""]))
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
