"""What a program costs on a GPU that need not be there, from XLA's compiler for it."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..ops._common.arguments import as_integer, as_number, describe
from ..ops.offload.host_pool import host_memory_limit
from . import plots, report
from ._buffers import Kind, Value, live_at_peak
from ._compile import Program, check_compiler, compile_for, lower
from ._hlo import Collective, HloModule, Transfer, collectives, parse, transfers
from .targets import Target, find_target


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes in one memory, on each device. An aliased result is in `arguments` and `outputs`."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # results written over a donated argument
    generated_code: int

    @property
    def total(self) -> int:
        """All together, each byte counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.generated_code


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in device memory.

    Attributes:
        shape: such as "f32[64,32,32,48]".
        bytes: on each device.
        kind: "argument", "output", "temporary" or "constant".
        operation: JAX's name of what made it: an argument's path, a primitive in its functions.
        source: the line that made it, "file.py:12", empty if unknown.
        caller: the user's line that led there, if `source` is of a library.
    """

    shape: str
    bytes: int
    kind: Kind
    operation: str
    source: str
    caller: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a compiled program needs on each device; made by `plan`.

    Attributes:
        target: the GPU.
        num_devices: how many of them the program spans.
        memory_fraction: the share of the GPU's memory that JAX takes for arrays.
        host_memory_bytes: pinned host memory that a process has, for all of its devices.
        device, host: bytes in device memory and in pinned host memory.
        constant_bytes: arrays that the program itself holds, in device memory.
        peak_buffers: what device memory holds when it is fullest, largest first.
        collectives: exchanges between devices, most bytes first.
        transfers: copies between device and host, most bytes first.
        hlo: the optimized program as text.
    """

    target: Target
    num_devices: int
    memory_fraction: float
    host_memory_bytes: int
    device: Bytes
    host: Bytes
    constant_bytes: int
    peak_buffers: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    hlo: str = dataclasses.field(repr=False)

    @property
    def peak_device_bytes(self) -> int:
        """Device memory while the program runs, for arguments, results, temporaries, constants."""
        return self.device.total + self.constant_bytes

    @property
    def peak_host_bytes(self) -> int:
        """Pinned host memory while the program runs, of all devices together."""
        return self.host.total * self.num_devices

    @property
    def available_bytes(self) -> int:
        """Device memory that JAX has for arrays."""
        return int(self.memory_fraction * self.target.memory_bytes)

    @property
    def share(self) -> float:
        """Of the memory there is, device or host, whichever the program fills more."""
        host = self.peak_host_bytes / self.host_memory_bytes
        return max(self.peak_device_bytes / max(self.available_bytes, 1), host)

    @property
    def fits(self) -> bool:
        """Whether device and host memory hold the program, with nothing else in them."""
        return (
            self.peak_device_bytes <= self.available_bytes
            and self.peak_host_bytes <= self.host_memory_bytes
        )

    def to_dict(self) -> dict[str, Any]:
        """All but the HLO as plain data, for JSON."""
        own = {"name", "description", "memory_bytes"}
        record = dataclasses.asdict(self)
        del record["hlo"]
        record["target"] = {name: getattr(self.target, name) for name in sorted(own)}
        return record | {
            "peak_device_bytes": self.peak_device_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "available_bytes": self.available_bytes,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        return report.plan_text(self)

    def __rich__(self) -> Any:
        return report.plan_tables(self)

    def plot(self, ax: Any = None, *, most: int = 12) -> Any:
        """Draws the largest buffers at the peak as bars (matplotlib); returns the axes."""
        return plots.plot_plan(self, ax, most)


def plan(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Path | Target = "h200",
    num_devices: int | None = None,
    memory_fraction: float = 0.75,
    host_memory_bytes: int | None = None,
    in_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Compiles a function for a GPU, which need not be there, and says what it needs of memory.

    Nothing is computed and no GPU is used: `args` may be shapes, and the caller's backend is left
    as it is. The compiler runs in a process of its own; a small step takes it seconds, a deep
    network a minute::

        peak = arguments + outputs − aliased + temporaries + code + constants
        fits = peak ≤ memory_fraction · the GPU's memory, and host bytes ≤ host_memory_bytes

    The program is the one that XLA would run on the GPU but for what it finds out there by timing
    kernels: a convolution may be given a faster algorithm that wants workspace besides. The CUDA
    context and the libraries (some hundred megabytes) are not counted; what else the process keeps
    on the device must be among `args` to be counted.

    Args:
        fun: the function, such as a training step. It may be jitted already (`jax.jit`, `nnx.jit`,
            `effjax.offload_jit`), with its own shardings and donations; arguments that it does not
            use are then not counted, as jax.jit drops them.
        *args: its arguments: arrays or shapes (`jax.ShapeDtypeStruct`) in any pytrees; of `nnx.jit`
            modules and optimizers too, whose arrays may be shapes (`nnx.eval_shape`). Their
            shardings hold, over any mesh (a `jax.sharding.AbstractMesh` needs no devices), and so
            do their memory kinds: what lives in `pinned_host` counts as host bytes.
        target: one of `list_targets()`, or a path to the text of an XLA GpuTargetConfigProto.
        num_devices: how many devices the program spans; None: what its shardings say.
        memory_fraction: the share of the GPU's memory that JAX takes: what
            XLA_PYTHON_CLIENT_MEM_FRACTION is there, and JAX's default without it.
        host_memory_bytes: pinned host memory that XLA takes for all devices of a process, which
            those of the program are taken to be. None: what XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says
            here, or XLA's default, 64 GiB.
        in_shardings: as for `jax.jit`; a PartitionSpec is over a mesh of one axis, `"data"`, with
            `num_devices` devices.
        donate_argnums, static_argnums: as for `jax.jit`.
        compiler_options: XLA's flags by name, without dashes, for this program.

    Returns:
        A `MemoryPlan`: bytes, largest buffers, collectives and transfers. Print it.

    Raises:
        TypeError: for an argument of the wrong type, or nnx modules in a function that is not
            `nnx.jit`'s: what it changes in them would be lost, and not be planned.
        ValueError: for an unknown target, a fraction outside (0, 1], a number of devices that the
            program does not span, or options of jit for a function that is jitted already.
        PlanError: if the compiler is not installed (the message says how to install it) or cannot
            compile the program (the message is XLA's).
    """
    return prepare(
        fun, *args, target=target, num_devices=num_devices, memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes, in_shardings=in_shardings,
        donate_argnums=donate_argnums, static_argnums=static_argnums,
        compiler_options=compiler_options,
    )()  # fmt: skip


def prepare(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Path | Target = "h200",
    num_devices: int | None = None,
    memory_fraction: float = 0.75,
    host_memory_bytes: int | None = None,
    in_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[], MemoryPlan]:
    """Checks and traces; what it returns compiles, in any thread. Arguments as `plan`."""
    found = find_target(target)
    if isinstance(memory_fraction, bool):
        raise TypeError(f"`memory_fraction` must be a number, not {memory_fraction}.")
    share = as_number("memory_fraction", memory_fraction, lambda f: 0 < f <= 1, "in (0, 1]")
    if host_memory_bytes is None:
        host_memory_bytes = host_memory_limit()
    on_host = as_integer("host_memory_bytes", host_memory_bytes, 1)
    if not isinstance(compiler_options, (Mapping, type(None))):
        raise TypeError(
            f"`compiler_options` must be values by name, not {describe(compiler_options)}."
        )
    check_compiler()
    lowered = lower(fun, args, num_devices, in_shardings, donate_argnums, static_argnums)
    return lambda: _read(compile_for(lowered, found, compiler_options), found, share, on_host)


def _read(program: Program, target: Target, memory_fraction: float, on_host: int) -> MemoryPlan:
    module = parse(program.hlo)
    values = live_at_peak(program.buffer_assignment, program.live_ranges)
    return MemoryPlan(
        target=target,
        num_devices=program.num_devices,
        memory_fraction=memory_fraction,
        host_memory_bytes=on_host,
        device=_bytes(program.device_bytes),
        host=_bytes(program.host_bytes),
        constant_bytes=sum(value.bytes for value in values if value.kind == "constant"),
        peak_buffers=tuple(_buffer(value, module) for value in values),
        collectives=collectives(module),
        transfers=transfers(module),
        hlo=program.hlo,
    )


def _bytes(counts: dict[str, int]) -> Bytes:
    return Bytes(
        arguments=counts["argument"],
        outputs=counts["output"],
        temporaries=counts["temp"],
        aliased=counts["alias"],
        generated_code=counts["generated_code"],
    )


def _buffer(value: Value, module: HloModule) -> Buffer:
    instruction = module.maker(value.instruction)
    operation, lines = "", ("", "")
    if instruction is not None:
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        operation, lines = name[1] if name else "", module.made_by(instruction)
    return Buffer(value.shape, value.bytes, value.kind, operation or value.instruction, *lines)
