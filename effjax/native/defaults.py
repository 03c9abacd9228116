"""Default implementation of operators on GPUs: validated CUDA kernels, or plain XLA.

`effjax doctor --gpu` compares the CUDA kernels with plain XLA on the GPUs of a machine. Its verdict
is a file in the user's cache directory, for this model of GPU, driver and library only.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax

from .. import native
from . import Choice
from ._distributed_shim import Store, find_store

# Outcomes for a kernel and a dtype. Only "faster" makes the kernel the default.
Outcome = Literal["faster", "slower", "wrong"]
Outcomes = Mapping[str, Mapping[str, Outcome]]  # by kernel and dtype

VARIABLE = "EFFJAX_CUDA"
_VALUES: dict[str, Choice] = {"on": "cuda", "off": "xla", "validated": "validated"}
_FORMAT = 1  # of the files
_PATIENCE = 300.0  # seconds to wait for process 0
_logger = logging.getLogger("effjax.native")


class Key(NamedTuple):
    """Identity of the devices and the library that a verdict is about."""

    gpu: str  # model
    driver: str
    cuda: str  # newest version that the driver supports
    library: str  # SHA-256 of the library


class Decision(NamedTuple):
    """The kernels that a process runs by default."""

    choice: Choice
    key: Key | None  # None without a GPU or without kernels
    outcomes: Outcomes

    def uses(self, kernel: str, dtype: str) -> bool:
        """Return True if the CUDA kernel is the default for arrays of this dtype."""
        if self.choice == "validated":
            return self.outcomes.get(kernel, {}).get(dtype) == "faster"
        return self.choice == "cuda"


def uses_cuda(kernel: str, dtype: Any) -> bool:
    """Return True if the CUDA kernel is the default for arrays of this dtype.

    Raises:
        ValueError: for an unknown value of `EFFJAX_CUDA`.
        RuntimeError: the processes of the job would decide differently.
    """
    return _decide(*native.default_choice()).uses(kernel, str(jax.numpy.dtype(dtype)))


@functools.cache  # programs of one process must agree
def _decide(choice: Choice | None, changes: int) -> Decision:
    own, store = _decide_alone(choice), find_store()
    return own if store is None else _agree(own, store, changes)


def _decide_alone(choice: Choice | None) -> Decision:
    choice = choice or _choice_of_environment()
    key = None if choice == "xla" else find_key("cuda")
    if choice != "validated" or key is None:
        return Decision(choice, key, {})
    outcomes = read_verdict(key)
    if outcomes is None:
        _logger.info(
            "operators run as plain XLA on this GPU. `effjax doctor --gpu` tests the CUDA kernels "
            "here, and those that are correct and faster run by default from then on."
        )
    return Decision(choice, key, outcomes or {})


def _choice_of_environment() -> Choice:
    value = os.environ.get(VARIABLE) or "validated"
    if value not in _VALUES:
        raise ValueError(f'{VARIABLE} (={value!r}) must be "validated", "on" or "off".')
    return _VALUES[value]


def _agree(own: Decision, store: Store, changes: int) -> Decision:
    """Return the decision of process 0, or raise an error if this process cannot follow it.

    Programs that differ between processes would wait for each other's collectives forever.
    """
    name = f"effjax/native/default/{changes}"
    if store.process == 0:
        store.write(name, json.dumps(own))
        return own
    here = f"process {store.process}"
    try:
        choice, key, outcomes = json.loads(store.read(name, _PATIENCE))
    except TimeoutError as error:
        raise RuntimeError(
            f"{here} waited {_PATIENCE:g} s for process 0 to choose between CUDA kernels and XLA. "
            f"All processes must trace the same operators, and call effjax.native.set_default "
            f"equally often (here {changes} times)."
        ) from error
    first = Decision(choice, None if key is None else Key(*key), outcomes)
    if first.choice != own.choice:
        raise RuntimeError(
            f"{here} chooses {own.choice!r} for its GPU kernels, process 0 {first.choice!r}. "
            f"Set {VARIABLE} to the same value in all processes, or call effjax.native.set_default "
            "with the same choice."
        )
    runs_cuda = first.choice == "cuda" or any(
        outcome == "faster" for by_dtype in outcomes.values() for outcome in by_dtype.values()
    )
    if runs_cuda and first.key != own.key:
        raise RuntimeError(
            f"process 0 runs CUDA kernels on {_describe(first.key)}, but {here} has "
            f"{_describe(own.key)}. Use the same GPUs, drivers and effjax, or {VARIABLE}=off."
        )
    return first


def _describe(key: Key | None) -> str:
    if key is None:
        return "no GPU with kernels"
    return f"{key.gpu}, driver {key.driver}, CUDA {key.cuda}, library {key.library[:12]}"


def find_key(platform: Literal["cpu", "cuda"]) -> Key | None:
    """Return the key of the devices and the library here.

    None without either, or with GPUs of several models. Platform "cpu" is for tests, which validate
    the CPU kernels in place of CUDA kernels.
    """
    if not native.is_available(platform):
        return None
    driver, cuda = "none", "none"
    if platform == "cuda":
        found = native.gpus()
        if found is None or not found.count:
            return None
        driver, cuda = _driver_version(), f"{found.driver // 1000}.{found.driver % 1000 // 10}"
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:  # JAX does not use the GPU
        return None
    kinds = {device.device_kind for device in devices}
    if len(kinds) != 1:
        return None
    with native.library_file(platform) as path:
        library = hashlib.sha256(path.read_bytes()).hexdigest()
    return Key(kinds.pop(), driver, cuda, library)


def _driver_version() -> str:
    """Return the version of NVIDIA's driver, such as "580.95.05", by NVML."""
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        pass
    return text.value.decode() or "unknown"


def cache_folder() -> Path:
    """Return the folder of verdicts, in the user's cache directory of effjax.

    Raises:
        RuntimeError: the user has no home directory.
    """
    # That of platformdirs on Linux, where CUDA kernels run. Operators import JAX only.
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "effjax" / "kernels"


def verdict_file(key: Key) -> Path:
    """Return the file of a verdict."""
    digest = hashlib.sha256(json.dumps([_FORMAT, key]).encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}.json"


def write_verdict(key: Key, outcomes: Outcomes) -> Path:
    """Store a verdict in one atomic step, and return its file."""
    path = verdict_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, "key": key._asdict(), "outcomes": outcomes}
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        try:
            json.dump(content, file, indent=2)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _decide.cache_clear()
    return path


def read_verdict(key: Key) -> Outcomes | None:
    """Return the stored outcomes, or None if they are missing or damaged."""
    path = None
    try:
        path = verdict_file(key)
        content = json.loads(path.read_text(encoding="utf-8"))
        outcomes, known = content["outcomes"], get_args(Outcome)
        if content["format"] != _FORMAT or Key(**content["key"]) != key:
            raise ValueError("it is of another GPU or version")
        if not all(o in known for by_dtype in outcomes.values() for o in by_dtype.values()):
            raise ValueError("it has unknown outcomes")
        return outcomes
    except FileNotFoundError:
        return None
    except RuntimeError:  # the user has no home directory
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _logger.warning(
            "ignoring %s (%s). `effjax doctor --gpu` writes it again.", path, error or repr(error)
        )
        return None


def remove_verdict(key: Key) -> None:
    """Delete a verdict, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        verdict_file(key).unlink()
    _decide.cache_clear()
