"""The directory of a run: config.json, metrics.jsonl, curve.png and checkpoints/."""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._extras import install_command
from .._files import check, check_regular, parse_object, read_text, replace_file
from .config import fingerprint
from .errors import TrainError, check_orbax_path, printable

DEFAULT = Path("runs")
VERSION_KEY = "effjax"  # in config.json: the version that made the run


class RunDirectory:
    """The directory of a run.

    Files are replaced atomically, except metrics.jsonl, which grows by lines. An incomplete last
    line is ignored and overwritten.

    Args:
        path: The directory.

    Attributes:
        writes: True if this process writes. Of several processes, only the first one does.
    """

    CONFIG, METRICS, CURVE, CHECKPOINTS = "config.json", "metrics.jsonl", "curve.png", "checkpoints"
    ARRAYS = "references.npz"  # numbers of the model at the start
    ARRAYS_DIGEST = "references_sha256"  # in config.json
    TRACKED = "tensorboard", "wandb", "trackio"  # files of trackers

    def __init__(self, path: Path):
        self.path, self.writes = path, True

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], overwrite: bool) -> "RunDirectory":
        """Create the directory of a new run.

        Args:
            path: The directory, such as `default_path` returns.
            config: The content of config.json.
            overwrite: Whether to delete the files of an earlier run. Other files are never deleted.
                An interrupted call leaves either the earlier run or the new one.

        Raises:
            TrainError: The directory holds a run or other files, or cannot be written to. Nothing
                has changed.
        """
        if importlib.util.find_spec("matplotlib") is None:  # draws the curve at the end
            raise TrainError(f"matplotlib is missing. Run {install_command('train')}.")
        check_orbax_path(path)
        run = cls(path)
        with _explain(path, "cannot be written to", "Give another --out."):
            existing = {file.name for file in path.iterdir()} if path.exists() else set()
            if existing - {f"{cls.CONFIG}.partial"}:  # left by a call that was interrupted
                if not run.is_run():
                    raise TrainError(f"{path}: not empty and not a run. Give another --out.")
                if not overwrite:
                    raise TrainError(f"{path}: holds a run. Give another --out, or --overwrite.")
            path.mkdir(parents=True, exist_ok=True)
            _check_writable(path)
            with run.locked():
                # config.json comes last: until then this is still the earlier run.
                for folder in (run.checkpoints, *(path / name for name in cls.TRACKED)):
                    if folder.exists():
                        shutil.rmtree(folder)
                for name in (cls.METRICS, cls.CURVE, cls.ARRAYS):
                    (path / name).unlink(missing_ok=True)
                run.write_config(config)
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open a run to resume it. Raises TrainError if there is none or it is read-only."""
        run = cls.find(path)
        check_orbax_path(path)
        with _explain(path, "cannot be resumed", "Check its path and its permissions."):
            _check_writable(path)
        return run

    @classmethod
    def find(cls, path: Path) -> "RunDirectory":
        """Open a run to read it. Raises TrainError if there is none."""
        with _explain(path, "cannot be read", "Check its path and its permissions."):
            if (path / cls.CONFIG).is_file():
                return cls(path)
        raise TrainError(f"{path}: not a run (no {cls.CONFIG}). Give the directory of a run.")

    def is_run(self) -> bool:
        """Return True if the directory is that of a run."""
        # Other programs have a config.json too.
        try:
            return VERSION_KEY in parse_object(read_text(self.path / self.CONFIG))
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this directory.

        The lock ends with this process, even if that is killed.

        Raises:
            TrainError: Another process has the lock.
        """
        if not self.writes:
            yield
            return
        # The system frees a lock of `flock` with its process. A lock file would stay after a kill.
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainError(
                    f"{self.path}: another process is training in it. Wait for its end, or give "
                    "another --out."
                ) from None
            except OSError as error:  # some file systems have no locks
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL):
                    raise
            yield
        finally:
            os.close(folder)

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / self.CHECKPOINTS

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        # Orbax renames the directory of a checkpoint to its number when it is complete.
        try:
            names = [path.name for path in self.checkpoints.iterdir()]
        except OSError:
            return None
        return max((int(name) for name in names if name.isdecimal()), default=None)

    @property
    def is_gone(self) -> bool:
        """True if the run has been deleted."""
        try:
            return not (self.path / self.CONFIG).exists()
        except OSError:
            return False

    def read_config(self) -> dict[str, Any]:
        """Return the content of config.json. Raises TrainError if its options were edited."""
        file = self.path / self.CONFIG
        with _explain(file, "cannot be read", "Start a new run."):
            config = parse_object(read_text(file))
            check(isinstance(config.get("base", {}), dict), "`base` is not an object")
            expected = config.get("fingerprint")
            edited = expected is not None and expected != fingerprint(config.get("options", {}))
        if edited:
            raise TrainError(
                f"{file}: its options were changed, and the run was trained with others. Put them "
                "back, or start a new run. To make one longer, use --resume with --epochs or "
                "--steps."
            )
        return config

    def write_config(self, config: dict[str, Any]) -> None:
        """Replace the content of config.json."""
        if self.writes:
            content = json.dumps(config, indent=2) + "\n"
            replace_file(self.path / self.CONFIG, content.encode())

    def read_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of `write_arrays`. Raises TrainError if they are missing or damaged."""
        file = self.path / self.ARRAYS
        digest = self.read_config().get(self.ARRAYS_DIGEST)
        with _explain(file, "cannot be read", "Put it back, or start a new run."):
            check_regular(file)
            content = file.read_bytes()
            # NumPy finds few damages, and raises many types of errors for them.
            check(hashlib.sha256(content).hexdigest() == digest, "it has changed")
            with np.load(io.BytesIO(content)) as arrays:
                return {name: arrays[name] for name in arrays.files}

    def write_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Store arrays that the run needs to continue, and their digest in config.json."""
        if self.writes:
            content = io.BytesIO()
            np.savez(content, **arrays)
            replace_file(self.path / self.ARRAYS, content.getvalue())
            digest = hashlib.sha256(content.getvalue()).hexdigest()
            self.write_config(self.read_config() | {self.ARRAYS_DIGEST: digest})

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without an incomplete last one."""
        file = self.path / self.METRICS
        with _explain(file, "cannot be read", "Start a new run."):
            lines = read_text(file).split("\n")[:-1] if file.exists() else []
            return [parse_object(line) for line in lines]

    def append(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, in place of an incomplete last one.

        Raises:
            OSError: The file cannot be written to, or the run has been deleted.
        """
        if not self.writes:
            return
        if self.is_gone:  # Orbax may have made the directory again
            raise FileNotFoundError(errno.ENOENT, "the run was deleted", str(self.path))
        line = json.dumps(record, allow_nan=False) + "\n"
        # A process that is killed here leaves part of a line, which the next call cuts off.
        with (self.path / self.METRICS).open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())

    def truncate_metrics(
        self, kind: str, step: int = 0, digest: str | None = None
    ) -> list[dict[str, Any]]:
        """Cut metrics.jsonl back to a checkpoint.

        Args:
            kind: The kind of the lines to keep, `"epoch"` or `"step"`.
            step: The step of the checkpoint. Later lines are dropped.
            digest: The expected `digest_json` of the lines to keep. None does not check them.

        Returns:
            The lines that were kept.

        Raises:
            TrainError: The lines have another digest. Nothing was dropped.
        """
        file = self.path / self.METRICS
        lines = [
            line
            for line in self.read_metrics()
            if line.get("kind") == kind and line.get("step") in range(1, step + 1)
        ]
        if digest not in (None, digest_json(lines)):
            raise TrainError(
                f"{file} was changed after the checkpoint of step {step} was saved. Put the file "
                "back, or start a new run."
            )
        if self.writes:
            replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return lines

    def draw(self, plot: Callable[[Any], None]) -> None:
        """Write curve.png: what `plot` draws on the axes that it is given."""
        if not self.writes:
            return
        # Not pyplot, which may want a display.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(printable(self.path.name), parse_math=False)  # it may contain a $
        plot(axes)
        figure.legend(loc="outside lower center", ncols=2)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120)
        replace_file(self.path / self.CURVE, content.getvalue())


def default_path(command: str) -> Path:
    """Return `runs/COMMAND-DATE-TIME`, with `-2`, `-3`, … appended if it exists."""
    name = time.strftime(f"{command}-%Y%m%d-%H%M%S")
    path, number = DEFAULT / name, 1
    while os.path.exists(path):
        number += 1
        path = DEFAULT / f"{name}-{number}"
    return path


def digest_json(value: Any) -> str:
    """Return the SHA-256 digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _explain(path: Path, problem: str, remedy: str) -> Iterator[None]:
    """Convert OSError and ValueError to TrainError."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TrainError(f"{path}: {problem} ({reason}). {remedy}") from error


def _check_writable(path: Path) -> None:
    # `os.access` knows of no read-only file systems or quotas, and says yes to root.
    with tempfile.TemporaryFile(dir=path):
        pass
