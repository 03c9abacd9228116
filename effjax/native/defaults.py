"""Default implementation of operators on GPUs: validated CUDA kernels, or plain XLA.

`effjax doctor --gpu` compares the CUDA kernels with plain XLA on the GPUs of a machine. Its verdict
is a file in the user's cache directory, for this model of GPU, driver and library only. A process
reads it once. In a job of several processes it does not count.
"""

import ctypes
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax

from .. import native
from . import Choice

# Outcomes for a kernel and a dtype. Only "faster" makes the kernel the default.
Outcome = Literal["faster", "slower", "wrong"]
Outcomes = Mapping[str, Mapping[str, Outcome]]  # by kernel and dtype

VARIABLE = "EFFJAX_CUDA"
_VALUES: dict[str, Choice] = {"on": "cuda", "off": "xla", "validated": "validated"}
_FORMAT = 1  # of the files
_logger = logging.getLogger("effjax.native")

# The first jaxlib that adds float32 numbers in memory by an instruction of the GPU. Before, a loop
# of compare-and-swap tries again as long as another thread writes to the same place
# (openxla/xla#46225: up to 450 times slower).
_ATOMIC_SUMS = (0, 11, 1)


class Key(NamedTuple):
    """Identity of the devices and the library that a verdict is about."""

    gpu: str  # model
    driver: str
    cuda: str  # newest version that the driver supports
    library: str  # SHA-256 of the library


def uses_cuda(kernel: str, dtype: Any) -> bool:
    """Return True if the CUDA kernel is the default for arrays of this dtype.

    Raises:
        ValueError: for an unknown value of `EFFJAX_CUDA`.
        RuntimeError: all CUDA kernels are chosen, and their library cannot be loaded.
    """
    choice = native.default_choice() or _VALUES[read_variable()]
    if choice == "cuda" and not native.is_available("cuda"):
        # In a job, plain XLA here would wait forever for the collectives of other programs.
        raise RuntimeError(
            f"{VARIABLE}=on, or effjax.native.set_default('cuda'), but the CUDA kernels are "
            f"{native.status()['cuda']}. See `effjax doctor`."
        )
    if choice == "validated":
        return _outcomes_here().get(kernel, {}).get(str(jax.numpy.dtype(dtype))) == "faster"
    return choice == "cuda"


def is_wrong(kernel: str, dtype: Any) -> bool:
    """Return True if a kernel was found to be wrong on the GPUs of this process."""
    return _outcomes_here().get(kernel, {}).get(str(jax.numpy.dtype(dtype))) == "wrong"


def describe_slow_sums() -> str | None:
    """Return what slows the gradients of plain XLA on the GPUs of this process, and what to do."""
    version = metadata.version("jaxlib")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers >= _ATOMIC_SUMS or jax.default_backend() != "gpu":
        return None
    old = any(float(device.compute_capability) < 9 for device in jax.local_devices())
    loop = f"a loop of compare-and-swap{'' if old else ' for some shapes'}"
    return (
        f"jaxlib {version} adds the gradients of sampled images, and of embeddings, in {loop}, "
        "which is slow where positions collide. Use jaxlib 0.11.1 or newer (Python 3.12), the CUDA "
        "kernels (effjax doctor --gpu), or "
        "XLA_FLAGS=--xla_backend_extra_options=-nvptx-allow-ftz-atomics."
    )


@functools.cache
def warn_of_slow_sums() -> None:
    """Log `describe_slow_sums` once."""
    if text := describe_slow_sums():
        _logger.warning(text)


def read_variable() -> str:
    """Return the value of `EFFJAX_CUDA`: "validated", "on" or "off"."""
    value = os.environ.get(VARIABLE) or "validated"
    if value not in _VALUES:
        raise ValueError(f'{VARIABLE} (={value!r}) must be "validated", "on" or "off".')
    return value


@functools.cache  # programs of one process must agree
def _outcomes_here() -> Outcomes:
    """Return the verdict on the GPUs of this process, which has none in a job of several."""
    # The processes of a job must run equal programs, and their verdicts may differ.
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        return {}
    key = find_key("cuda")
    if key is None:
        return {}
    outcomes = read_verdict(key)
    if outcomes is None:
        _logger.info(
            "operators run as plain XLA on this GPU. `effjax doctor --gpu` tests the CUDA kernels "
            "here, and those that are correct and faster run by default from then on."
        )
    return outcomes or {}


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
    return Key(kinds.pop(), driver, cuda, library_digest(platform))


def library_digest(platform: Literal["cpu", "cuda"]) -> str:
    """Return the SHA-256 of the library of a platform.

    Raises:
        FileNotFoundError: it was not built.
    """
    with native.library_file(platform) as path:
        return hashlib.sha256(path.read_bytes()).hexdigest()


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
    _outcomes_here.cache_clear()
    return path


def read_verdict(key: Key) -> Outcomes | None:
    """Return the stored outcomes, or None if they are missing or damaged."""
    path = None
    try:
        path = verdict_file(key)
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ValueError("it is not a regular file")
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
