"""All benchmarks by name, one way through: what they find is printed, and written to a folder as
JSON, as pictures and as one summary.

Each is a function ``results(size)`` in a file of its own, which yields a `Result` a table. Nothing
heavy is imported before one runs.
"""

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ._result import Result, Size

INTERRUPTED = 130


class Benchmark(NamedTuple):
    """The file in this folder that has its `results`, and what they show."""

    module: str
    shows: str


BENCHMARKS = {
    "batch-norm": Benchmark(
        "batch_norm", "batch norm with ReLU beside Flax's: time, and bytes kept"
    ),
    "sync-batch-norm": Benchmark(
        "sync_batch_norm",
        "batch norm over 1 to 8 simulated devices beside Flax's: all-reduces, bytes kept, error",
    ),
    "dense-block": Benchmark(
        "dense_block",
        "a step of a dense block beside autodiff, Flax, jax.checkpoint and PyTorch: time",
    ),
    "depth": Benchmark(
        "depth", "the memory of a dense block by its depth, and how fast it grows, in all forms"
    ),
    "densenet": Benchmark(
        "densenet", "a training step of a DenseNet beside Flax's layers and jax.checkpoint: time"
    ),
    "deform-conv": Benchmark(
        "deform_conv", "deformable convolution beside torchvision and plain XLA: time"
    ),
    "deform-attention": Benchmark(
        "deform_attention", "deformable attention beside a packed gather of plain XLA: time"
    ),
    "roi": Benchmark("roi", "roi_align over a feature pyramid beside torchvision: time"),
    "offload": Benchmark(
        "offload",
        "a language model in memory, recomputed, by JAX's offload policies, and offloaded",
    ),
    "planner": Benchmark("planner", "what the planner itself takes, by the depth of the model"),
    "cross-entropy": Benchmark(
        "cross_entropy", "gradients of a large vocabulary beside whole logits: planned memory"
    ),
    "import-time": Benchmark("import_time", "what import effjax adds to import jax"),
    "resnet": Benchmark("resnet", "a step of a ResNet beside Flax's layers: planned memory"),
}


class Report:
    """What has been found so far; its summary is there after each benchmark."""

    def __init__(self, folder: Path, command: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.command = folder, command
        self.sections: list[str] = []
        self.lines: list[str] = []
        self.last: list[str] = []  # of what did not end
        self.failed = False

    def add(self, name: str, result: "Result") -> None:
        """Prints a table, and writes it with its picture."""
        from ._plot import draw, save
        from ._result import as_markdown, publish

        publish(result, self.folder, self.command)
        text = as_markdown(result)
        if (figure := draw(result)) is not None:
            save(figure, self.folder / f"{result.name}.svg")
            text += f"\n![{result.title}]({result.name}.svg)\n"
        self.sections.append(text)
        self.lines += headlines(name, result)
        self.write()

    def write(self) -> None:
        """DIR/summary.md"""
        from ._result import machine, versions

        found = versions()
        packages = ", ".join(f"{n} {v}" for n, v in found.items() if n not in ("device", "python"))
        cpu = machine()
        head = [
            "# Benchmarks of effjax", "", f"`{self.command}`", "",
            f"{cpu['cpu']}, {cpu['threads']} of {cpu['cores']} cores; {found['device']}; "
            f"Python {found['python']}, {packages}.", "",
            *(f"- {line}" for line in self.endings()), "",
        ]  # fmt: skip
        (self.folder / "summary.md").write_text("\n".join([*head, *self.sections]))

    def stopped(self, name: str, error: Exception) -> str:
        """Notes that a benchmark did not end; returns why."""
        if said := _missing(error):
            said = f"left out, {said}"
        else:
            self.failed = True
            log = self.folder / f"{name}.log"
            log.write_text("".join(traceback.format_exception(error)))
            first = (str(error).strip() or "without a word").splitlines()[0][:200]
            said = f"FAILED, {type(error).__name__}: {first} (see {log.name})"
        self.last.append(f"{name}: {said}")
        return said

    def endings(self) -> list[str]:
        """The lines of the summary."""
        return self.lines + self.last


def headlines(name: str, result: "Result") -> list[str]:
    """A line a table: every row of effjax beside the reference, or how fast each grows."""
    from ._result import RATIOS, is_ours

    if result.plot == RATIOS:
        found = [row for row in result.rows if is_ours(result, row["name"])]
        ratios = [
            f"{row['name']} {row['ratio']:.2f} ({low:.2f}–{high:.2f})"
            for row in found
            for low, high in [row.get("ratio_quartiles") or (row["ratio"],) * 2]
        ]
        said = f"{', '.join(ratios)} of the time of {result.config.get('reference', 'the first')}"
    else:
        powers = (row for row in result.rows if "exponent" in row)
        said = ", ".join(f"{row['name']} ∝ depth^{row['exponent']:.2f}" for row in powers)
    return [": ".join(filter(None, [name, result.title, said]))]


def run_all(
    names: Sequence[str],
    size: "Size",
    folder: Path,
    command: str,
    say: Callable[[str], None] = print,
) -> int:
    """Runs benchmarks one after the other; returns the exit code.

    One that cannot run here says why and is left out; one that fails is said at the end, and the
    code is 1. Ctrl-C ends them all, and what was found before is there.
    """
    from ._result import machine

    report, code, cpu = Report(folder, command), 0, machine()
    say(f"size {size}, on {cpu['cpu']}: {cpu['threads']} threads, {cpu['cores']} cores")
    for i, name in enumerate(names, 1):
        start = time.perf_counter()
        say(f"[{i}/{len(names)}] {name}: {BENCHMARKS[name].shows}")
        try:
            for result in results_of(name, size):
                report.add(name, result)
        except KeyboardInterrupt:
            say(f"interrupted in {name}; what was found is in {folder}")
            code = INTERRUPTED
            break
        except Exception as error:
            say(f"{name}: {report.stopped(name, error)}")
        say(f"{name}: {time.perf_counter() - start:.0f} s\n")
    report.write()
    say("\n".join(report.endings()))
    say(f"written to {folder}: summary.md, and a JSON file and a picture for each table")
    return code or int(report.failed)


def _missing(error: Exception) -> str | None:
    """What a benchmark lacks, and how to get it; None: it has failed."""
    from ._result import Unavailable

    if isinstance(error, Unavailable):
        return str(error)
    package = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "effjax"):
        return f'{package} is missing; run pip install "effjax[train]"'
    return None


def results_of(name: str, size: "Size") -> Iterator["Result"]:
    """The tables of one benchmark, each as soon as it is there."""
    yield from importlib.import_module(f".{BENCHMARKS[name].module}", __package__).results(size)
