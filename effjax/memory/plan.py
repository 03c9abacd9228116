"""Memory plans: compile a program for a device that is not attached, and read its memory use."""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TypedDict, Unpack

from ..ops._common.arguments import as_integer, as_number
from .compiler.cache import compile_or_read
from .compiler.lower import PlanError, lower
from .compiler.packages import find_compiler
from .compiler.process import CompiledProgram, open_pipe
from .devices import Rates, Target, find_rates, find_target
from .read.buffers import Buffer, Bytes, allocated_bytes, live_at_peak
from .read.hlo import HloModule, collectives, parse, transfers
from .render import Progress, format_bytes
from .results import Comparison, MemoryPlan
from .time.step_time import step_time

DEFAULT_TARGET = "h200"


class PlanArguments(TypedDict, total=False):
    """Keyword arguments of `plan`, which explains them, and of the functions that call it."""

    target: str | Path | Target
    num_devices: int | None
    memory_fraction: float | None
    host_memory_bytes: int | None
    in_shardings: Any
    donate_argnums: int | Sequence[int]
    static_argnums: int | Sequence[int]
    compiler_options: Mapping[str, Any] | None
    rates: Rates | None
    cache: str | Path | None


def plan(fun: Callable[..., Any], *args: Any, **options: "Unpack[PlanArguments]") -> MemoryPlan:
    """Compile a function for a GPU or TPU and return its memory use and modelled time.

    The device need not exist on this machine, and nothing is computed: `args` may be shapes. The
    compiler runs in a separate process and leaves the caller's backend unchanged. The first plan
    downloads it, see docs/planner.md. A plan takes seconds for a small step and about a minute for
    a deep network. The peak, and whether it fits, are::

        peak = arguments + outputs − aliased + temporaries + code + constants
        fits = peak ≤ memory_fraction · device memory, and host bytes ≤ host_memory_bytes, if known

    The program is the one that XLA runs on the device, with one exception: on a GPU, XLA picks
    convolution algorithms by timing them, and a faster algorithm may need additional workspace. The
    CUDA context and libraries (some hundred megabytes) are not counted. To count other arrays of
    the process, pass them in `args`.

    The compiler for TPUs refuses a program that does not fit. The plan of such a program has the
    compiler's message in `refusal`, and shows the buffers that the compiler assigned before.

    Args:
        fun: the function, such as a training step. It may be jitted (`jax.jit`, `nnx.jit`,
            `effjax.offload_jit`), with its own shardings and donations; jax.jit then drops unused
            arguments, and the plan does not count them.
        *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`; for `nnx.jit` also
            modules and optimizers, whose arrays may be shapes (`nnx.eval_shape`). Shardings over
            any mesh are kept (a `jax.sharding.AbstractMesh` needs no devices), and so are memory
            kinds: arrays in `pinned_host` count as host bytes.
        **options: the following, each by its name.
        target: one of `list_targets()`, or a path to the text of an XLA GpuTargetConfigProto. By
            default "h200".
        num_devices: number of devices that the program spans. By default, its shardings determine
            it.
        memory_fraction: fraction of the device memory that JAX reserves, in (0, 1]; set on a GPU
            with XLA_PYTHON_CLIENT_MEM_FRACTION. By default JAX's: 0.75 on a GPU, 1 on a TPU.
        host_memory_bytes: pinned host memory of a process that uses all devices of the program. By
            default, the host bytes of a GPU program are shown and not compared, because machines
            differ; for a TPU, those of the virtual machines in Google Cloud with these devices.
        in_shardings: as in `jax.jit`. A PartitionSpec refers to a mesh of `num_devices` devices
            with one axis, `"data"`.
        donate_argnums: as in `jax.jit`.
        static_argnums: as in `jax.jit`.
        compiler_options: XLA flags for this program, by name without dashes.
        rates: peak rates for the modelled time. By default `find_rates(target)`.
        cache: a folder in which the compiled program is stored, and from which an equal one is
            read instead of compiled; its plan names the source lines of that time. By default none.

    Returns:
        A `MemoryPlan`: bytes, largest buffers, collectives, transfers and modelled time. It can be
        printed.

    Raises:
        TypeError: for nnx modules in a function that is not transformed by nnx, whose updates of
            the modules would be lost, and for an unknown argument.
        ValueError: for an unknown target, a fraction outside (0, 1], a number of devices that the
            program does not span, or options of jit for a function that is jitted already.
        PlanError: if the compiler cannot be installed or cannot compile the program.
    """
    finish = start_plan(fun, args, options)
    with open_pipe() as pipe:
        return finish(pipe)


def compare(
    programs: Mapping[str, Callable[..., Any] | Sequence[Any]],
    *args: Any,
    progress: bool = False,
    **options: "Unpack[PlanArguments]",
) -> Comparison:
    """Plan several programs in parallel and compare them.

    Example::

        compare({"plain": step, "recompute": other_step}, params, batch, target="a100-40")
        compare({"in memory": (step, state, batch), "offloaded": (other, other_state, batch)})

    Args:
        programs: by name, a function of `*args`, or a tuple `(fun, *its_args)` with arguments of
            its own. Ratios are relative to the first program.
        *args: arguments of the functions, arrays or shapes.
        progress: whether to report finished programs on stderr.
        **options: those of `plan`, the same for all programs.

    Returns:
        A `Comparison`: a dictionary of plans that prints as a table, with `plot()` and `to_dict()`.
        Programs that the compiler refuses are in its `errors` instead.

    Raises:
        ValueError: if there are no programs, or `args` that no program takes; and as `plan`.
        TypeError, PlanError: as `plan`; if no program can be compiled.
    """
    if not programs:
        raise ValueError("`programs` must not be empty.")
    if args and not any(map(callable, programs.values())):
        raise ValueError("`args` must be empty if all programs are tuples (fun, *its_args).")
    steps = {
        name: (program, *args) if callable(program) else program
        for name, program in programs.items()
    }
    first, *others = steps
    title = f"compiling for {find_target(options.get('target', DEFAULT_TARGET)).description}"
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, open_pipe() as pipe, ExitStack() as stack:
        # An error or Ctrl-C cancels the waiting programs first. Then the pipe closes, which ends
        # the running compilers, and last the pool waits for its threads.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def submit(name: str) -> Future[tuple[MemoryPlan, float]]:
            # Trace in this thread: settings such as `jax.set_mesh` are thread-local.
            start = time.perf_counter()
            fun, *fun_args = steps[name]
            finish = start_plan(fun, fun_args, options)
            return pool.submit(lambda: (finish(pipe), time.perf_counter() - start))

        def running() -> list[str]:
            return [name for future, name in futures.items() if future.running()]

        # The first program is traced before anything is printed, so that an error in the shared
        # options stands alone.
        futures = {submit(first): first}
        report = Progress(title, len(steps), progress)
        for name in others:
            report.run(running())
            futures[submit(name)] = name
        pending, plans, errors = set(futures), {}, {}
        while pending:
            report.run(running())
            done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
            for future in done:
                name = futures[future]
                try:
                    plans[name], seconds = future.result()
                except PlanError as error:
                    errors[name] = error
                    report.finish(f"{name}: cannot be compiled")
                    continue
                size = format_bytes(plans[name].peak_device_bytes)
                report.finish(f"{name}: {size} at the peak, {seconds:.1f} s")
    if not plans:
        raise errors[first]
    return Comparison({name: plans[name] for name in steps if name in plans}, errors)


def start_plan(
    fun: Callable[..., Any], args: Sequence[Any], options: PlanArguments
) -> Callable[[IO[bytes]], MemoryPlan]:
    """Validate and trace; return a function that compiles until a pipe closes, in any thread."""
    if unknown := options.keys() - PlanArguments.__annotations__:
        raise TypeError(f"a plan has no argument `{min(unknown)}`. See help(effjax.memory.plan).")
    device = find_target(options.get("target", DEFAULT_TARGET))
    rates = options.get("rates") or find_rates(device)
    fraction = resolve_memory_fraction(options.get("memory_fraction"), device)
    if (on_host := options.get("host_memory_bytes")) is not None:
        on_host = as_integer("host_memory_bytes", on_host, 1)
    if (num_devices := options.get("num_devices")) is not None:
        device.topology(as_integer("num_devices", num_devices, 1))
    find_compiler(device.platform)  # before the program is traced, which may take long
    lowered = lower(
        fun, args, num_devices, options.get("in_shardings"), options.get("donate_argnums", ()),
        options.get("static_argnums", ()), device,
    )  # fmt: skip
    # The number of devices may follow from the shardings.
    on_host = on_host or device.host_bytes_per_device * lowered.num_devices or None
    folder = None if (cache := options.get("cache")) is None else Path(cache)

    def finish(pipe: IO[bytes]) -> MemoryPlan:
        compiler_options = options.get("compiler_options")
        program = compile_or_read(lowered, device, compiler_options, pipe, folder)
        return _read_plan(program, device, fraction, on_host, rates)

    return finish


def resolve_memory_fraction(memory_fraction: float | None, device: Target) -> float:
    """Return the fraction of device memory that a program may use, by default JAX's."""
    if memory_fraction is None:
        return device.default_memory_fraction
    return as_number("memory_fraction", memory_fraction, lambda f: 0 < f <= 1, "in (0, 1]")


def _read_plan(
    program: CompiledProgram,
    target: Target,
    memory_fraction: float,
    host_memory_bytes: int | None,
    rates: Rates,
) -> MemoryPlan:
    module, assignment = parse(program.hlo), program.buffer_assignment
    buffers = live_at_peak(assignment, program.live_ranges, target.platform)
    device = allocated_bytes(assignment, target.platform)
    host = allocated_bytes(assignment, target.platform, on_host=True)
    if program.refusal and not assignment:  # refused early
        device = dataclasses.replace(device, temporaries=_read_refused_bytes(program.refusal))
    elif not (target.is_gpu or program.refusal):
        # The totals of a TPU program include memory on the chip. Without it they agree with the
        # bytes that the compiler states when it refuses a program.
        of_device = program.device_bytes | {"temporaries": device.temporaries}
        device, host = Bytes(**of_device), Bytes(**program.host_bytes)
    return MemoryPlan(
        target=target,
        num_devices=program.num_devices,
        memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes,
        device=device,
        host=host,
        constant_bytes=sum(buffer.bytes for buffer in buffers if buffer.kind == "constant"),
        peak_buffers=tuple(_add_source(buffer, module) for buffer in buffers),
        collectives=collectives(module),
        transfers=transfers(module),
        step_time=step_time(module, rates, program.num_devices),
        hlo=program.hlo,
        refusal=program.refusal,
    )


def _read_refused_bytes(message: str) -> int:
    """Return the bytes that a program needs by the message of the compiler that refused it."""
    size = re.search(r"\(([\d.]+)([KMGT])\)", message)
    return int(float(size[1]) * 2 ** (10 * (1 + "KMGT".index(size[2])))) if size else 0


def _add_source(buffer: Buffer, module: HloModule) -> Buffer:
    """Replace XLA's name of a buffer's instruction by that of JAX, and add its source lines."""
    instruction = module.instruction_of(buffer.operation)
    if instruction is None:
        return buffer
    name = re.search(r'op_name="([^"]+)"', instruction.attributes)
    operation = name[1] if name else buffer.operation
    source, caller = module.source_and_caller(instruction)
    return dataclasses.replace(buffer, operation=operation, source=source, caller=caller)
