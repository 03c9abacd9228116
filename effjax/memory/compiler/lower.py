"""Tracing and lowering of functions for GPUs and TPUs, of arrays or of nnx modules."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
    get_abstract_mesh,
    use_abstract_mesh,
)

from ...ops._common.arguments import as_integer, describe
from ...ops._common.platform import trace_for_platform
from ...ops.offload.backends import allow_guard, needed_options
from ..devices import Target
from ._device_queries_shim import answer_queries
from ._source_info_shim import record_library_lines

SPLITS_ITSELF = (
    "an operator with a partitioning rule, such as effjax.deform_conv2d, cannot be planned under "
    "jit over several GPUs of a mesh with Auto axes, because the compiler process cannot call the "
    "rule. Give the mesh Explicit axes (axis_types), or plan the step inside jax.shard_map."
)
_USE_NNX_JIT = "Plan nnx.jit of the function, or a function of arrays (nnx.split and nnx.merge)."


class PlanError(RuntimeError):
    """Error for a program that cannot be compiled for the target, or for a missing compiler."""


class DeviceCountError(ValueError):
    """Error for a program that spans a different number of devices than requested."""

    def __init__(self, requested: int, spanned: int):
        super().__init__(
            f"`num_devices` (={requested}) must be the number of devices that the program spans "
            f"(={spanned}). Give `in_shardings`, or arguments with shardings over a mesh of "
            f"{requested}."
        )
        self.spanned = spanned


class LoweredProgram(NamedTuple):
    """A program to compile."""

    module: jax.stages.Lowered
    num_devices: int
    compiler_options: dict[str, Any]  # required by its operators


def lower(
    fun: Callable[..., Any],
    args: Sequence[Any],
    num_devices: int | None,
    in_shardings: Any,
    donate_argnums: int | Sequence[int],
    static_argnums: int | Sequence[int],
    target: Target,
) -> LoweredProgram:
    """Trace `fun` and lower it for the target, in this process."""
    jit_options = _jit_options(in_shardings, num_devices or 1, donate_argnums, static_argnums)
    if isinstance(fun, functools.partial) and not fun.keywords and hasattr(fun.func, "trace"):
        fun, args = fun.func, (*fun.args, *args)  # a method under nnx.jit
    if not _accepts_modules(fun):
        refuse_modules(args, _USE_NNX_JIT)

    jitted: Any = fun
    if not hasattr(fun, "trace"):
        # JAX caches lowered programs by function. A new function avoids programs that were lowered
        # outside of `allow_guard`.
        wrapper: Any = functools.wraps(fun)(lambda *args, **kwargs: fun(*args, **kwargs))
        jitted = jax.jit(wrapper, keep_unused=True, **jit_options)
    elif jit_options:
        raise ValueError(
            f"`{'`, `'.join(jit_options)}` cannot be given for a function that is jitted already. "
            "Give them to its jax.jit, or pass the function without jit."
        )
    arrays, merge = split_modules(args)
    with trace_for_platform(target.platform), _abstract_device(target), answer_queries(target):
        traced = jitted.trace(*merge(jax.tree.map(_keep_memory_kind, arrays)))
    traced = getattr(traced, "traced", traced)  # nnx wraps JAX's object
    options = needed_options(traced.jaxpr) if target.platform == "cuda" else {}
    # A program that jax.jit would refuse to run on a GPU is refused here too.
    is_compiled_with_options = jitted is not fun or getattr(fun, "is_offload_jit", False)
    with allow_guard() if is_compiled_with_options else contextlib.nullcontext():
        lowered = _lower_for(target, traced)
    module: Any = lowered.compiler_ir("stablehlo")
    spanned = int(module.operation.attributes["mhlo.num_partitions"].value)
    if num_devices is not None and num_devices != spanned:
        raise DeviceCountError(num_devices, spanned)
    return LoweredProgram(lowered, spanned, options)


def _jit_options(
    in_shardings: Any, num_devices: int, donate_argnums: Any, static_argnums: Any
) -> dict[str, Any]:
    """Return the options for `jax.jit` that were given."""
    options: dict[str, Any] = {}
    if in_shardings is not None:
        mesh = make_data_mesh(num_devices)
        options["in_shardings"] = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec) if isinstance(spec, PartitionSpec) else spec,
            in_shardings,
            is_leaf=lambda spec: isinstance(spec, PartitionSpec),
        )
    for name, value in (("donate_argnums", donate_argnums), ("static_argnums", static_argnums)):
        if value is not None and value != () and value != []:
            options[name] = value
    return options


def make_data_mesh(num_devices: int) -> Mesh | AbstractMesh:
    """Return a mesh with one axis, "data", for arguments of `plan`.

    It consists of this process's devices if there are enough. Otherwise it is abstract.
    """
    as_integer("num_devices", num_devices, 1)
    auto = (AxisType.Auto,)
    if jax.device_count() >= num_devices:
        devices = jax.devices()[:num_devices]
        return jax.make_mesh((num_devices,), ("data",), auto, devices=devices)
    return AbstractMesh((num_devices,), ("data",), axis_types=auto)


def _abstract_device(target: Target) -> contextlib.AbstractContextManager:
    # Pallas kernels query the device's generation when they are traced and lowered. A mesh set by
    # the caller is kept.
    if not get_abstract_mesh().empty:
        return contextlib.nullcontext()
    device = AbstractDevice(
        device_kind=target.description,
        num_cores=None if target.platform == "cuda" else 1,
        platform="gpu" if target.platform == "cuda" else "tpu",
    )
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _lower_for(target: Target, traced: Any) -> jax.stages.Lowered:
    try:
        with record_library_lines(), _abstract_device(target), answer_queries(target):
            return traced.lower(lowering_platforms=(target.platform,))
    except ValueError as error:
        if "AbstractMesh cannot be used" in str(error):
            raise PlanError(SPLITS_ITSELF) from error
        if "lowering platform" not in str(error):
            raise
        raise PlanError(
            "callbacks to Python (jax.debug.print, pure_callback) cannot be planned. Remove them: "
            f"{error}"
        ) from error


def _keep_memory_kind(a: Any) -> Any:
    # JAX drops the memory kind of a SingleDeviceSharding when it traces, but not that of a
    # NamedSharding.
    sharding = getattr(a, "sharding", None)
    if not isinstance(a, jax.ShapeDtypeStruct) or not isinstance(sharding, SingleDeviceSharding):
        return a
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=list(sharding.device_set))
    named = NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=named)


# Flax is not imported here: a caller that passes a module has imported it.


def refuse_modules(args: Any, remedy: str) -> None:
    """Raise TypeError if `args` contains nnx modules or optimizers."""
    # JAX passes copies of them to the function. Their updates would be dropped, and XLA would then
    # remove everything that only the updates need, gradients first.
    for path, value in jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_module):
        if _is_module(value):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"`args{name}` is {describe(value)}, an nnx object, but the function is not "
                f"transformed by nnx, so updates of the object would be lost. {remedy}"
            )


def split_modules(args: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Split nnx modules from their arrays.

    Returns:
        A pytree of all arrays, and a function that merges such a pytree into arguments. Arrays
        shared between modules stay shared.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=_is_module)
    modules = [i for i, leaf in enumerate(leaves) if _is_module(leaf)]
    if not modules:
        return args, lambda tree: tree
    nnx: Any = sys.modules["flax.nnx"]
    graph, state = nnx.split([leaves[i] for i in modules])

    def merge(tree: Any) -> Any:
        state, others = tree
        merged = dict(zip(modules, nnx.merge(graph, state), strict=True))
        return structure.unflatten([merged.get(i, leaf) for i, leaf in enumerate(others)])

    return (state, [None if _is_module(leaf) else leaf for leaf in leaves]), merge


def _accepts_modules(fun: Any) -> bool:
    """Return True for functions made by `nnx.jit` or `effjax.nnx.offload_jit`."""
    is_flax = hasattr(fun, "trace") and type(fun).__module__.partition(".")[0] == "flax"
    return is_flax or getattr(fun, "takes_modules", False)


def _is_module(value: Any) -> bool:
    """Return True for a module, an optimizer or random streams; False for an nnx.State."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)
