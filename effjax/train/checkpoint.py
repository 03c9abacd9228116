"""Checkpoints of a run, numbered by step and verified before they are restored.

There are two kinds. A checkpoint saved at an evaluation has a score. A checkpoint saved between two
evaluations has no score; it only bounds the work that an interrupted run loses.

Orbax writes a checkpoint into a temporary directory, and renames the directory when it is complete.
Just before the rename, in the background, the first process adds a manifest with the step, the
score, the SHA-256 digest of each file, and that of the records of the run. A checkpoint is damaged
if it does not match its manifest or has none. Without the digests, a flipped bit in an array would
go unnoticed.

Each process writes and reads the parts of the arrays that its devices hold, in slices: see
`array_handler`. A checkpoint can be restored on other devices, and by another number of processes.
"""

import contextlib
import errno
import hashlib
import json
import shutil
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from .._files import parse_object, read_text
from .._slices import sharding_of
from .._version import __version__
from .array_handler import make_handler_registry
from .errors import PreemptionError, TrainError
from .processes import is_multiprocess, run_on_first
from .run_directory import digest_json
from .task import Metrics, Record

MANIFEST = "manifest.json"
FORMAT = 2  # of the manifest and the arrays
ENTRIES = {"format", "effjax", "step", "score", "metrics", "records", "files"}  # of the manifest
# Orbax writes these files after the manifest, so it cannot contain their digests. They hold times
# and a completion marker. Nothing reads them: see `lightweight_initialize` below.
WRITTEN_AFTER_MANIFEST = ("_CHECKPOINT_METADATA", "commit_success.txt")
# Limit for one save, during which processes wait for each other and for the digests of all files.
TIMEOUT_SECONDS = 2 * 60 * 60

# Higher is better. Tuples are compared lexicographically.
Score = tuple[float, ...]


def _count_time_monotonically() -> None:
    """Let Orbax measure its time limits by a clock that does not jump."""
    # It counts by `time.time`: a wall clock that is set would end a save, which cannot be repeated
    # because the next step reuses the memory of the state.
    clock = types.SimpleNamespace(**{**vars(time), "time": time.monotonic})
    for name in "futures.future", "futures.signaling_client", "checkpointers.async_checkpointer":
        module: Any = sys.modules.get(f"orbax.checkpoint._src.{name}")
        if module is not None:
            module.time = clock


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        # The training loop already polls JAX for a preemption, with its own counter (see
        # `processes.is_preempted`). JAX expects consecutive numbers, and Orbax would poll it
        # with step numbers.
        return False


class _PreservationPolicy:
    """Keep the newest checkpoint, the last `keep` evaluated ones, and the best one.

    Until the first evaluation, the oldest checkpoint is kept in place of the best one. A run can
    then fall back to it if the newest checkpoint is damaged.
    """

    def __init__(self, keep: int, scores: dict[int, Score]):
        # `Checkpoints` adds scores to this dict later, so it must not be copied.
        self.keep, self.scores = keep, scores

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        evaluated = [step for step in steps if step in self.scores]
        kept = {steps[-1], *evaluated[-self.keep :]}
        kept.add(max(evaluated, key=self.scores.__getitem__, default=steps[0]))
        return [step in kept for step in steps]


class Checkpoints:
    """The checkpoints of a run. Use it as a context manager: leaving it waits for the last save.

    With several processes, all must make the same calls in the same order.

    Args:
        directory: The directory of the checkpoints; created if it is missing.
        keep: Number of evaluated checkpoints to keep, the last ones, in addition to the best and
            the newest checkpoint.
    """

    def __init__(self, directory: Path, keep: int = 1):
        self.directory = directory
        self._scores: dict[int, Score] = {}
        # Manifest of the checkpoint being written, without digests. The background thread of Orbax
        # reads it, so it must not change before the save has finished.
        self._saving: dict[str, Any] = {}
        # `run_on_first` returns JSON types: tuples arrive as lists.
        self._scores.update(
            (step, tuple(score)) for step, score in run_on_first(lambda: [*self._read_scores()])
        )
        _count_time_monotonically()
        options = ocp.CheckpointManagerOptions(
            lightweight_initialize=True,  # do not read _CHECKPOINT_METADATA, which has no digest
            preservation_policy=_PreservationPolicy(keep, self._scores),
            async_options=ocp.AsyncOptions(
                timeout_secs=TIMEOUT_SECONDS,
                post_finalization_callback=self._write_manifest,
            ),
        )
        with self._translate_errors():
            self._manager = _Manager(
                directory.absolute(), options=options, handler_registry=make_handler_registry()
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and is_multiprocess() and not issubclass(kind, PreemptionError):
            # Another process may have failed, or may wait for this one. Waiting could deadlock.
            return
        # If the block raised, a failed save must not hide its exception.
        suppressed = () if kind is None else (OSError,)
        with contextlib.suppress(*suppressed):
            try:
                self.wait()
            finally:
                with self._translate_errors():
                    self._manager.close()

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order."""
        # Processes may see different states of a network file system. The first one decides.
        return run_on_first(lambda: sorted(self._manager.all_steps()))

    @property
    def evaluated_steps(self) -> list[int]:
        """The steps that have a checkpoint with a score, best first."""
        evaluated = [step for step in self.steps if step in self._scores]
        return sorted(evaluated, key=self._scores.__getitem__, reverse=True)

    def save(
        self,
        step: int,
        state: Any,
        score: Score | None = None,
        metrics: Sequence[Metrics] = (),
        records: Sequence[Record] = (),
    ) -> None:
        """Write a checkpoint, after the previous save has finished.

        The arrays are written when this returns, and the state may be donated. The checkpoint is
        completed in the background, and those that need not be kept are then deleted.

        Args:
            step: The number of steps taken.
            state: A pytree of arrays.
            score: The score of the evaluation at this step; higher is better. None between two
                evaluations.
            metrics: The metrics of each step since the last evaluation. Empty at an evaluation.
            records: The records of all evaluations. Only their digest is saved.

        Raises:
            OSError: This checkpoint or the previous one cannot be written.
        """
        self.wait()  # the previous save reads `_saving`
        self._saving = {
            "format": FORMAT,
            "effjax": __version__,
            "step": step,
            "score": score,
            "metrics": [*metrics],
            "records": digest_json([*records]),
        }
        if score is not None:
            self._scores[step] = tuple(score)  # before the save, which asks the preservation policy
        with self._translate_errors():
            # `force`: the training loop decides when to save, and not Orbax's save policy.
            args = ocp.args.StandardSave(jax.tree.map(jnp.asarray, state))
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Wait until the last save has finished.

        Raises:
            OSError: It failed.
        """
        with self._translate_errors():
            self._manager.wait_until_finished()

    def find_damage(self, step: int) -> str | None:
        """Describe how the files of a checkpoint differ from its manifest; None if they do not."""
        return run_on_first(lambda: _find_damage(self.directory / str(step), step))

    def read_metrics(self, step: int) -> tuple[list[dict[str, float]], str]:
        """Return the metrics and the digest of the records; the checkpoint must be intact."""
        manifest = run_on_first(lambda: _read_manifest(self.directory / str(step)))
        return manifest["metrics"], manifest["records"]

    def restore_first_intact(
        self, like: Any, steps: Iterable[int], log: Callable[[str], None]
    ) -> tuple[int, Any]:
        """Restore the first of the given checkpoints that is intact.

        The damaged ones before it are renamed to `damaged-STEP`.

        Args:
            like: A pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and
                dtypes of the state. Each restored array gets the sharding of its counterpart, or
                is placed on the first device of this process if that has none.
            steps: Steps to try, in order of preference.
            log: Function that is called with one line for each damaged checkpoint.

        Returns:
            The step and the state.

        Raises:
            TrainError: No checkpoint is intact, or the first intact one belongs to another model or
                another version of effjax, or cannot be read. Nothing has been renamed.
        """
        damaged: dict[int, str] = {}
        for step in steps:
            damage = self.find_damage(step)
            if damage is None:
                state = self.restore(like, step)
                break
            damaged[step] = damage
        else:
            listed = ", ".join(f"{step}: {damage}" for step, damage in damaged.items())
            raise TrainError(
                f"{self.directory}: no checkpoint is intact ({listed}). Restore the files, or "
                "start a new run."
            )
        # Rename only now: a failed restore leaves all files in place.
        for bad, damage in damaged.items():
            run_on_first(lambda bad=bad: self._rename_damaged(bad))
            self._scores.pop(bad, None)
            log(
                f"{self.directory / str(bad)} is damaged ({damage}) and was renamed to "
                f"damaged-{bad}. Using {self.directory / str(step)}"
            )
        if damaged:
            self._manager.reload()  # Orbax caches the list of steps
        return step, state

    def restore(self, like: Any, step: int) -> Any:
        """Return the state of an intact checkpoint, as `restore_first_intact` does."""
        like = jax.tree.map(_shape_of, like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except jax.errors.JaxRuntimeError:  # a device error such as out of memory
            raise
        except OSError as error:
            raise TrainError(
                f"{self.directory / str(step)} cannot be read ({error.strerror or error}). "
                "Try again."
            ) from error
        # Orbax raises many exception types if the structure, a shape or a dtype differs.
        except Exception as error:
            raise TrainError(
                f"{self.directory / str(step)} is intact, but does not match the model in "
                f"config.json ({type(error).__name__}). Put the config.json of the run back, or "
                "start a new run."
            ) from error

    def _rename_damaged(self, step: int) -> None:
        target = self.directory / f"damaged-{step}"  # replaces one of an earlier resume
        shutil.rmtree(target, ignore_errors=True)
        (self.directory / str(step)).rename(target)

    def _write_manifest(self) -> None:
        # Orbax calls this in the first process, after all processes have written their files and
        # before it renames the temporary directory.
        (folder,) = self.directory.glob(f"{self._saving['step']}.orbax-checkpoint-tmp*")
        manifest = {**self._saving, "files": _digest_files(folder)}
        manifest["sha256"] = digest_json(manifest)  # of all other entries
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")

    def _read_scores(self) -> Iterator[tuple[int, list[float]]]:
        for file in self.directory.glob(f"*/{MANIFEST}"):
            # A damaged checkpoint has no score. `find_damage` reports it later.
            with contextlib.suppress(OSError, ValueError):
                manifest = _read_manifest(file.parent)
                if manifest["score"] is not None and file.parent.name == str(manifest["step"]):
                    yield manifest["step"], manifest["score"]

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert exceptions of a failed write to OSError."""
        try:
            yield
        except (OSError, jax.errors.JaxRuntimeError):  # JaxRuntimeError: a device error
            raise
        # Zarr and TensorStore raise their own exceptions, with the system's error in the message.
        except Exception as error:
            code, reason = errno.EIO, f"{type(error).__name__} in Orbax"
            if "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error):
                code, reason = errno.ENOSPC, "No space left on device"
            elif "File too large" in str(error):
                code, reason = errno.EFBIG, "File too large, see ulimit -f"
            path = self.directory / str(self._saving.get("step", ""))
            raise OSError(code, reason, str(path)) from error


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(x))


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        TrainError: It is intact, but of another format.
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    manifest = parse_object(read_text(checkpoint / MANIFEST))
    if manifest.pop("sha256", None) != digest_json(manifest):
        raise ValueError("the manifest does not match its SHA-256 digest")
    if manifest.get("format") != FORMAT:
        raise TrainError(
            f"{checkpoint} was written by effjax {manifest.get('effjax', 'before 0.1.0')}, in "
            f"another format than that of effjax {__version__}. Use that version, or start a new "
            "run."
        )
    if missing := ENTRIES - manifest.keys():
        raise ValueError(f"the manifest has no {min(missing)}")
    return manifest


def _find_damage(checkpoint: Path, step: int) -> str | None:
    try:
        manifest = _read_manifest(checkpoint)
    except FileNotFoundError:
        return f"no {MANIFEST}; versions of effjax before 0.1.0 wrote none"
    except (OSError, ValueError) as error:
        return f"no intact {MANIFEST}: {type(error).__name__}"
    expected = manifest["files"]
    if manifest["step"] != step:
        return f"its files are those of step {manifest['step']}"
    try:
        actual = _digest_files(checkpoint)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not in its {MANIFEST}"
        if actual[name] != expected[name]:
            return f"{name} has changed"
    return None


def _digest_files(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 digest of each file, by its path relative to the checkpoint."""
    digests = {}
    for file in sorted(checkpoint.rglob("*")):
        name = file.relative_to(checkpoint).as_posix()
        if file.is_file() and name not in (MANIFEST, *WRITTEN_AFTER_MANIFEST):
            with file.open("rb") as stream:
                digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests
