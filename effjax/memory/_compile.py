"""From a function and the shapes of its arguments to a program for a GPU that is not there."""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    get_abstract_mesh,
    use_abstract_mesh,
)

from ..ops._common.arguments import as_callable, as_integer, describe
from ..ops._common.platform import trace_for_platform
from ..ops.offload.compiled import allowed, needed_options
from ._frames_shim import lines_of_libraries
from ._modules import knows_modules, opened, refuse_modules
from .targets import Target

# There is no GPU to time kernels on.
_COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_INSTALL = 'pip install "effjax[plan]" (on Linux)'
PATIENCE = 10  # seconds that the compiler may stand still
_SPLITS_ITSELF = (
    "an operator that says by itself how jit splits it over devices, such as effjax.deform_conv2d, "
    "cannot be asked by the compiler, which is a process of its own: plan the step inside "
    "jax.shard_map over the same mesh."
)
_OF_MODULES = "Plan nnx.jit of the function, or one of arrays, by nnx.split and nnx.merge."


class PlanError(RuntimeError):
    """A program that cannot be compiled for the target, or no compiler to do it with."""


class SpanError(ValueError):
    """A program over another number of devices than was asked for."""

    def __init__(self, asked: int, spanned: int):
        super().__init__(
            f"`num_devices` is {asked} but the program spans {spanned} devices: give "
            f"`in_shardings`, or arguments with shardings over a mesh of {asked}."
        )
        self.spanned = spanned


class Lowered(NamedTuple):
    """A program for the compiler."""

    module: jax.stages.Lowered
    num_devices: int
    compiler_options: dict[str, Any]  # what its operators ask for


class Program(NamedTuple):
    """What the compiler says of a program, on each device."""

    num_devices: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    hlo: str
    buffer_assignment: str  # XLA's text
    live_ranges: str  # XLA's text


def lower(
    fun: Callable[..., Any],
    args: Sequence[Any],
    num_devices: int | None,
    in_shardings: Any,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
) -> Lowered:
    """Traces `fun` and lowers it for CUDA, in this process.

    Shardings without devices (`AbstractMesh`) keep memory kinds, and need no more devices than this
    process has.
    """
    if num_devices is not None:
        as_integer("num_devices", num_devices, 1)
    given = _of_jit(in_shardings, num_devices or 1, donate_argnums, static_argnums)
    if isinstance(fun, functools.partial) and not fun.keywords and hasattr(fun.func, "trace"):
        fun, args = fun.func, (*fun.args, *args)  # a method under nnx.jit is one
    if not knows_modules(as_callable("fun", fun)):
        refuse_modules(args, _OF_MODULES)

    jitted: Any = fun
    if not hasattr(fun, "trace"):
        # A function of its own: JAX keeps what it has lowered by function.
        own: Any = functools.wraps(fun)(lambda *args, **kwargs: fun(*args, **kwargs))
        jitted = jax.jit(own, keep_unused=True, **given)
    elif given:
        raise ValueError(
            f"`{'`, `'.join(given)}` given for a function that is jitted already: give them to its "
            "jax.jit, or the function as it was before."
        )
    arrays, close = opened(args)
    with trace_for_platform("cuda"), _on_a_gpu():
        traced = jitted.trace(*close(jax.tree.map(_with_memory_kind, arrays)))
    traced = getattr(traced, "traced", traced)  # nnx's holds JAX's
    options = needed_options(traced.jaxpr)
    # What jax.jit would refuse to run on a GPU is refused here too.
    own_jit = jitted is not fun or getattr(fun, "is_offload_jit", False)
    with allowed() if own_jit else contextlib.nullcontext():
        lowered = _lower_for_cuda(traced)
    module: Any = lowered.compiler_ir("stablehlo")
    spanned = int(module.operation.attributes["mhlo.num_partitions"].value)
    if num_devices is not None and num_devices != spanned:
        raise SpanError(num_devices, spanned)
    return Lowered(lowered, spanned, options)


def _of_jit(
    in_shardings: Any, num_devices: int, donate_argnums: Any, static_argnums: Any
) -> dict[str, Any]:
    """What is given to `jax.jit`."""
    given: dict[str, Any] = {}
    if in_shardings is not None:
        given["in_shardings"] = _on_mesh(in_shardings, num_devices)
    for name, value in (("donate_argnums", donate_argnums), ("static_argnums", static_argnums)):
        value = () if value is None else value
        numbers = value if isinstance(value, (tuple, list)) else (value,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"`{name}` must be numbers of arguments, not {describe(value)}.")
        if numbers:
            given[name] = value
    return given


def _on_a_gpu() -> contextlib.AbstractContextManager:
    """Kernels of Pallas ask which GPU they are for, when they are traced and when they are lowered.
    All that they learn is its generation; a caller's mesh stays."""
    if not get_abstract_mesh().empty:
        return contextlib.nullcontext()
    gpu = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def _lower_for_cuda(traced: Any) -> jax.stages.Lowered:
    try:
        with lines_of_libraries(), _on_a_gpu():
            return traced.lower(lowering_platforms=("cuda",))
    except ValueError as error:
        if "AbstractMesh cannot be used" in str(error):
            raise PlanError(_SPLITS_ITSELF) from error
        if "lowering platform" not in str(error):
            raise
        raise PlanError(
            "calls back to Python (jax.debug.print, pure_callback) cannot be planned; leave them "
            f"out: {error}"
        ) from error


def _with_memory_kind(a: Any) -> Any:
    """A shape whose memory kind is traced: JAX forgets that of a SingleDeviceSharding."""
    sharding = getattr(a, "sharding", None)
    if not isinstance(a, jax.ShapeDtypeStruct) or not isinstance(sharding, SingleDeviceSharding):
        return a
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=list(sharding.device_set))
    named = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named)


def _on_mesh(shardings: Any, num_devices: int) -> Any:
    """PartitionSpecs become shardings over a mesh of one axis, `data`."""
    mesh = mesh_to_plan_for(num_devices)

    def resolve(spec: Any) -> Any:
        if not isinstance(spec, (PartitionSpec, Sharding)):
            raise TypeError(
                f"`in_shardings` must be of shardings and PartitionSpecs, not {describe(spec)}."
            )
        if not isinstance(spec, PartitionSpec):
            return spec
        try:
            return NamedSharding(mesh, spec)
        except ValueError as error:
            raise ValueError(
                f'`in_shardings` has {spec}, which must be over the axis "data": {error}'
            ) from error

    return jax.tree.map(resolve, shardings, is_leaf=lambda s: isinstance(s, PartitionSpec))


def mesh_to_plan_for(num_devices: int) -> Mesh | AbstractMesh:
    """A mesh of one axis, `"data"`, for arguments of `plan`.

    It is of this process's devices where those suffice; else it has none, which most programs can
    do with.

    Args:
        num_devices: how many it spans.

    Raises:
        TypeError, ValueError: if that is no number of at least 1.
    """
    as_integer("num_devices", num_devices, 1)
    auto = (AxisType.Auto,)
    if jax.device_count() >= num_devices:
        devices = jax.devices()[:num_devices]
        return jax.make_mesh((num_devices,), ("data",), auto, devices=devices)
    return AbstractMesh((num_devices,), ("data",), axis_types=auto)


def compile_for(
    lowered: Lowered,
    target: Target,
    compiler_options: Mapping[str, Any] | None,
) -> Program:
    """Compiles for the target, in a process of its own.

    Raises:
        PlanError: with what the compiler says.
    """
    asked = lowered.compiler_options | dict(compiler_options or {})
    options = _COMPILER_OPTIONS | {k: str(v) for k, v in asked.items()}
    with tempfile.TemporaryDirectory(prefix="effjax-plan-") as name:
        folder = Path(name)
        module: Any = lowered.module.compiler_ir("stablehlo")
        with open(folder / "module.mlirbc", "wb") as file:
            module.operation.write_bytecode(file)
        (folder / "target.txtpb").write_text(target.config)
        request = {"num_devices": lowered.num_devices, "compiler_options": options}
        (folder / "request.json").write_text(json.dumps(request))
        with _alive() as alive:
            run = subprocess.Popen(
                [sys.executable, "-P", "-m", f"{__package__}._gpu_compiler_shim", name],
                env=_environment(), stdin=alive, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
            said = _said_at_its_end(run)
        result_file = folder / "result.json"
        if run.returncode or not result_file.exists():
            raise PlanError(
                f"the compiler for {target.description} ended with exit code {run.returncode}: "
                f"{said[-4000:].strip() or 'it said nothing'}"
            )
        result = json.loads(result_file.read_text())
        if "custom_partitioner" in result.get("error", ""):
            raise PlanError(_SPLITS_ITSELF)
        if "error" in result:
            raise PlanError(
                f"the program cannot be compiled for {target.description}: {result['error']}"
            )
        return Program(
            num_devices=lowered.num_devices,
            device_bytes=result["device"],
            host_bytes=result["host"],
            hlo=(folder / "program.hlo").read_text(),
            buffer_assignment=_dumped(folder, "buffer-assignment"),
            live_ranges=_dumped(folder, "live-range"),
        )


def _said_at_its_end(run: subprocess.Popen) -> str:
    """What a process says; one that somebody has stopped, and does not continue, is ended."""
    stopped = 0
    with run:  # closes its pipes
        try:
            while True:
                try:
                    return run.communicate(timeout=1)[1]
                except subprocess.TimeoutExpired:
                    stopped = stopped + 1 if _is_stopped(run.pid) else 0
                if stopped > PATIENCE:
                    raise PlanError(
                        f"the compiler (process {run.pid}) has been stopped for {PATIENCE} s, and "
                        "was ended: plan again"
                    )
        finally:
            run.kill()


def _is_stopped(process: int) -> bool:
    """By a signal, such as SIGSTOP; Linux tells."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@contextlib.contextmanager
def _alive() -> Iterator[int]:
    """A pipe that stays open as long as this process lives."""
    ends = os.pipe()
    try:
        yield ends[0]
    finally:
        for end in ends:
            os.close(end)


def check_compiler() -> None:
    """Raises PlanError, which says what to install, where the GPU compiler is not installed."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        map(importlib.util.find_spec, _PLUGINS)
    ):
        raise PlanError(f"the GPU compiler is not installed: {_INSTALL}")


def _environment() -> dict[str, str]:
    """The caller's, but the process starts no CUDA backend and finds what the caller imports."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(_search_path()),
    }


def _search_path() -> list[str]:
    """The caller's without the current folder, where any file may bear a module's name; last of all
    if effjax or JAX lies there."""
    found = [path for path in sys.path if path and Path(path).absolute() != Path.cwd()]
    homes = (str(Path(file).parents[level]) for file, level in ((__file__, 2), (jax.__file__, 1)))
    return list(dict.fromkeys([*found, *homes]))


def _dumped(folder: Path, what: str) -> str:
    """XLA's dump of that name; of the largest module, if the compiler made several."""
    files = (folder / "dump").glob(f"*gpu_after_optimizations-{what}.txt")
    return max((file.read_text() for file in files), key=len, default="")
