"""The files of a run: config.json, metrics.jsonl, curve.png, checkpoints/, at times partway/."""

import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .config import fingerprint
from .errors import TrainError, unreadable

DEFAULT = Path("runs")
KEY = "effjax"  # of config.json: the version that made the run
ROLLED_BACK = "rolled back"  # the kind of a line of metrics.jsonl


class RunDirectory:
    """Where one run writes. Each file is whole at any moment: replaced, or grown by a line.

    Args:
        path: the directory.
        writes: whether this process does; of several, the first one.
    """

    CONFIG, METRICS, CURVE = "config.json", "metrics.jsonl", "curve.png"
    CHECKPOINTS, PARTWAY = "checkpoints", "partway"

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = path, writes

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], overwrite: bool) -> "RunDirectory":
        """Makes the directory, or raises `TrainError` and leaves everything as it was.

        Args:
            path: the directory, such as `unused` names one.
            config: what config.json shall hold.
            overwrite: whether the files of an earlier run are deleted. Other files never are. It
                is a run until it is another one, whenever this ends.
        """
        if importlib.util.find_spec("matplotlib") is None:  # draws the curve at the end
            raise TrainError('matplotlib is missing; run pip install "effjax[train]"')
        run = cls(path)
        try:
            there = {file.name for file in path.iterdir()} if path.exists() else set()
            if there - {f"{cls.CONFIG}.partial"}:  # which is left of one that ended at once
                if not run._is_one():
                    raise TrainError(f"{path}: not empty and not a run; give another --out")
                if not overwrite:
                    raise TrainError(f"{path}: holds a run; give another --out, or --overwrite")
            made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            try:
                with tempfile.TemporaryFile(dir=path):
                    pass
            except OSError:
                if made:
                    path.rmdir()
                raise
            with run.locked():
                run._clear()
                run.config = config
        except OSError as error:
            raise _unusable(path, error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An earlier run, to go on with it."""
        run = cls.find(path)
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise TrainError(
                f"{path}: cannot be gone on with ({error.strerror or error}); check its path and "
                "its permissions"
            ) from error
        return run

    @classmethod
    def find(cls, path: Path) -> "RunDirectory":
        """An earlier run, to read it."""
        run = cls(path)
        try:
            if run._file(cls.CONFIG).is_file():
                return run
        except OSError as error:
            raise unreadable(path, error) from error
        raise TrainError(f"{path}: not a run (no {cls.CONFIG}); give the directory of a run")

    def _is_one(self) -> bool:
        """Whether config.json is of a run: other programs have files of that name too."""
        try:
            return KEY in _object(self._file(self.CONFIG).read_text())
        except (OSError, ValueError):
            return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets no other process train here; ends with this one, however that ends.

        Raises:
            TrainError: another one does.
        """
        if not self.writes:
            yield
            return
        folder = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainError(
                    f"{self.path}: another process is training in it; wait for its end, or give "
                    "another --out"
                ) from None
            except OSError as error:  # some file systems have no locks
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL):
                    raise
            yield
        finally:
            os.close(folder)

    @property
    def checkpoints(self) -> Path:
        return self._file(self.CHECKPOINTS)

    @property
    def partway(self) -> Path:
        return self._file(self.PARTWAY)

    @property
    def is_gone(self) -> bool:
        """Whether somebody has deleted it."""
        try:
            return not self._file(self.CONFIG).exists()
        except OSError:
            return False

    @property
    def config(self) -> dict[str, Any]:
        """What config.json holds; `TrainError` if its options are not those of the run any more."""
        file = self._file(self.CONFIG)
        try:
            config = _object(file.read_text())
            options = config.get("options", {})
            known = config.get("fingerprint")  # older runs have none
            same = known is None or known == fingerprint(options)
        except (OSError, ValueError) as error:
            raise TrainError(f"{file}: cannot be read ({error}); start a new run") from error
        if not same:
            raise TrainError(
                f"{file}: its options were changed, and the run was trained with others; put them "
                "back, or start a new run (to make one longer, use --resume with --epochs or "
                "--steps)"
            )
        return config

    @config.setter
    def config(self, config: dict[str, Any]) -> None:
        if self.writes:
            _replace(self._file(self.CONFIG), json.dumps(config, indent=2) + "\n")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, less a last one that was not written to its end."""
        file = self._file(self.METRICS)
        try:
            if not file.exists():
                return []
            return [_object(line) for line in file.read_text().split("\n")[:-1]]
        except (OSError, ValueError) as error:
            raise TrainError(f"{file}: cannot be read ({error}); start a new run") from error

    def append(self, record: dict[str, Any]) -> None:
        """One more line in metrics.jsonl, in place of a last one that was not written whole."""
        if not self.writes:
            return
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._file(self.METRICS).open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())

    def keep(
        self, kind: str, wanted: Sequence[int], fields: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Drops all lines of metrics.jsonl but those of a kind, such as `epoch`, up to the last of
        the `wanted` numbers of that kind, and returns these. What was rolled back stays too.

        Raises:
            TrainError: one of these is missing or there twice, or has no number in one of the
                `fields`; nothing is dropped then.
        """
        file, last = self._file(self.METRICS), max(wanted, default=0)
        lines = self.metrics
        records = [r for r in lines if r.get("kind") == kind and _lies_in(r.get(kind), last)]
        found = [r[kind] for r in records]
        missing = set(wanted) - set(found)
        twice = next((number for number in found if found.count(number) > 1), None)
        bare = next(((r[kind], f) for r in records for f in fields if not _is_number(r.get(f))), ())
        if missing or twice is not None or bare:
            what = "{} has no {}".format(*bare) if bare else f"{twice} is there twice"
            what = f"{min(missing)} is missing" if missing else what
            raise TrainError(
                f"{file}: {kind} {what}, and there is a checkpoint of {kind} {last}; put the file "
                "back, or start a new run"
            )
        if self.writes:
            kept = [r for r in lines if r in records or r.get("kind") == ROLLED_BACK]
            _replace(file, "".join(json.dumps(r) + "\n" for r in kept))
        return records

    def draw(self, plot: Callable[[Any], None]) -> None:
        """curve.png: what `plot` puts on the axes that it is given."""
        if not self.writes:
            return
        figure, axes = _figure(self.path.name)
        plot(axes)
        figure.legend(loc="outside lower center", ncols=2)
        partial = self._file(f"{self.CURVE}.partial")
        figure.savefig(partial, format="png", dpi=120)
        os.replace(partial, self._file(self.CURVE))

    def _file(self, name: str) -> Path:
        return self.path / name

    def _clear(self) -> None:
        """Deletes all but config.json, which is replaced."""
        for folder in (self.checkpoints, self.partway):
            if folder.exists():
                shutil.rmtree(folder)
        for name in (self.METRICS, self.CURVE):
            self._file(name).unlink(missing_ok=True)


def unused(command: str) -> Path:
    """`runs/COMMAND-DATE-TIME`, and `-2`, `-3`, … if there is one already."""
    name = time.strftime(f"{command}-%Y%m%d-%H%M%S")
    path, number = DEFAULT / name, 1
    try:
        while path.exists():
            number += 1
            path = DEFAULT / f"{name}-{number}"
    except OSError as error:
        raise _unusable(path, error) from error
    return path


def _figure(title: str) -> tuple[Any, Any]:
    """An empty figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title)
    return figure, axes


def _lies_in(number: Any, last: int) -> bool:
    return isinstance(number, int) and 0 < number <= last


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, not an object")
    return value


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def _unusable(path: Path, error: OSError) -> TrainError:
    return TrainError(
        f"{path}: cannot be written to ({error.strerror or error}); give another --out"
    )
