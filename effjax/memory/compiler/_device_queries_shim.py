"""Answers to questions of attention kernels about the device, while a program is traced.

cuDNN attention (`jax.nn.dot_product_attention(implementation="cudnn")`), tokamax and Pallas Mosaic
GPU ask for the GPU and the version of cuDNN of this machine when they are traced and lowered. The
compiler needs neither. Inside `answer_queries` they get the figures of the target.

Replaces functions of private JAX modules while any thread is inside, and calls the originals in all
other threads. Tested with jax 0.10.2 and 0.12.0.1, tokamax 0.0.17.
"""

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from ..devices import Target, read_figure


class _Device(NamedTuple):
    """The attributes of a `jax.Device` that kernels read."""

    device_kind: str
    compute_capability: str
    core_count: int
    shared_memory_per_block_optin: int
    cudnn_version: int
    platform: str = "gpu"


_device = jax.make_user_context(None)  # part of the key of JAX's trace caches
_lock = threading.Lock()
_num_inside = 0
_originals: dict[tuple[Any, str], Any] = {}


@contextlib.contextmanager
def answer_queries(target: Target) -> Iterator[None]:
    """Answer questions about the GPU for the target, in this thread; nothing for other targets."""
    if not target.is_gpu:
        yield
        return
    with _device(_describe(target)):
        _replace()
        try:
            yield
        finally:
            _restore()


def _describe(target: Target) -> _Device:
    major, minor = read_figure(target, "major") or 0, read_figure(target, "minor") or 0
    cudnn = re.search(
        r"dnn_version_info\s*{\s*major:\s*(\d+)\s*minor:\s*(\d+)(?:\s*patch:\s*(\d+))?",
        target.config,
    )
    version = [int(number or 0) for number in cudnn.groups()] if cudnn else [9, 10, 0]
    return _Device(
        device_kind=target.description,
        compute_capability=f"{major:.0f}.{minor:.0f}",
        core_count=int(read_figure(target, "core_count") or 1),
        shared_memory_per_block_optin=int(
            read_figure(target, "shared_memory_per_block_optin") or 48 * 1024
        ),
        cudnn_version=version[0] * 10_000 + version[1] * 100 + version[2],
    )


def _capability(device: _Device) -> tuple[int, ...]:
    return tuple(map(int, device.compute_capability.split(".")))


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


# The functions that ask, by module, and their answers.
_ANSWERS: dict[str, dict[str, Callable[..., Any]]] = {
    "jax._src.cudnn.fused_attention_stablehlo": {
        "check_cudnn_version": lambda device: device.cudnn_version,
        "check_compute_capability": lambda device, least: _capability(device) >= _numbers(least),
        "is_cuda_compute_capability_equal": lambda device, other: (
            _capability(device) == _numbers(other)
        ),
    },
    "jax.extend.backend": {"get_default_device": lambda device: device},
    # Takes any abstract device for compute capability 9.0 in jax 0.10.2.
    "jax.experimental.mosaic.gpu.core": {"_infer_arch": lambda device: _capability(device)},
}


class _CudaVersions:
    """The library of jaxlib's CUDA plugin that states versions, without the plugin."""

    def cuda_runtime_get_version(self) -> int:
        return 13_000  # that of the planner's compiler


# Requires the library to be importable where its kernels are traced.
_NEEDS_CUDA_VERSIONS = "jax.experimental.pallas.ops.gpu.attention_mgpu"


def _replace() -> None:
    """Replace the functions of modules that are imported; a program imports what it uses."""
    global _num_inside
    with _lock:
        _num_inside += 1
        for module_name, answers in _ANSWERS.items():
            module = sys.modules.get(module_name)
            for name, answer in answers.items():
                original = getattr(module, name, None)
                if original is not None and (module, name) not in _originals:
                    _originals[module, name] = original
                    setattr(module, name, _answering(original, answer))
        module: Any = sys.modules.get(_NEEDS_CUDA_VERSIONS)
        if module is not None and module.cuda_versions is None:
            _originals[module, "cuda_versions"] = None
            module.cuda_versions = _CudaVersions()


def _restore() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if not _num_inside:
            for (module, name), original in _originals.items():
                setattr(module, name, original)
            _originals.clear()


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        device = _device.value
        return original(*args, **kwargs) if device is None else answer(device, *args, **kwargs)

    return ask
