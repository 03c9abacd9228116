"""Memory plans: compile a program for a device that is not attached, and read its memory use."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from ..ops._common.arguments import as_integer, as_number
from .compiler.cache import with_cache
from .compiler.lower import PlanError, lower
from .compiler.packages import find_compiler
from .compiler.process import CompiledProgram, compile_for, open_pipe
from .devices import Rates, Target, find_rates, find_target
from .read.buffers import Value, allocated_bytes, live_at_peak
from .read.hlo import HloModule, collectives, parse, transfers
from .render import format_bytes, progress_bar
from .results import Buffer, Bytes, Comparison, MemoryPlan
from .time.step_time import step_time

DEFAULT_TARGET = "h200"


def plan(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Path | Target = DEFAULT_TARGET,
    num_devices: int | None = None,
    memory_fraction: float | None = None,
    host_memory_bytes: int | None = None,
    in_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
) -> MemoryPlan:
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
        target: one of `list_targets()`, or a path to the text of an XLA GpuTargetConfigProto.
        num_devices: number of devices that the program spans. If None, its shardings determine it.
        memory_fraction: fraction of the device memory that JAX reserves, in (0, 1]; set on a GPU
            with XLA_PYTHON_CLIENT_MEM_FRACTION. If None, JAX's: 0.75 on a GPU, 1 on a TPU.
        host_memory_bytes: pinned host memory of a process that uses all devices of the program. If
            None, the host bytes of a GPU program are shown and not compared, because machines
            differ; for a TPU, those of the virtual machines in Google Cloud with these devices.
        in_shardings: as in `jax.jit`. A PartitionSpec refers to a mesh of `num_devices` devices
            with one axis, `"data"`.
        donate_argnums: as in `jax.jit`.
        static_argnums: as in `jax.jit`.
        compiler_options: XLA flags for this program, by name without dashes.
        rates: peak rates for the modelled time. If None, `find_rates(target)`.

    Returns:
        A `MemoryPlan`: bytes, largest buffers, collectives, transfers and modelled time. It can be
        printed.

    Raises:
        TypeError: for nnx modules in a function that is not transformed by nnx, whose updates of
            the modules would be lost.
        ValueError: for an unknown target, a fraction outside (0, 1], a number of devices that the
            program does not span, or options of jit for a function that is jitted already.
        PlanError: if the compiler cannot be installed or cannot compile the program.
    """
    finish = start_plan(
        fun, *args, target=target, num_devices=num_devices, memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes, in_shardings=in_shardings,
        donate_argnums=donate_argnums, static_argnums=static_argnums,
        compiler_options=compiler_options, rates=rates,
    )  # fmt: skip
    with open_pipe() as pipe:
        return finish(pipe)


def compare(
    programs: Mapping[str, Callable[..., Any] | Sequence[Any]],
    *args: Any,
    progress: bool = False,
    **options: Any,
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
        **options: options of `plan`, the same for all programs.

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
    # An error or Ctrl-C cancels the waiting programs, and closes the pipe of the running compilers.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool, open_pipe() as pipe, _cancelling(pool):

        def submit(name: str) -> Future[tuple[MemoryPlan, float]]:
            # Trace in this thread: settings such as `jax.set_mesh` are thread-local.
            start = time.perf_counter()
            fun, *fun_args = steps[name]
            finish = start_plan(fun, *fun_args, **options)
            return pool.submit(lambda: (finish(pipe), time.perf_counter() - start))

        # The first program is traced before the progress bar starts, so that an error in the shared
        # options appears without it.
        futures = {submit(first): first}
        title = f"compiling for {find_target(options.get('target', DEFAULT_TARGET)).description}"
        with progress_bar(title, len(steps), progress) as report:
            running = lambda: [name for f, name in futures.items() if f.running()]  # noqa: E731
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


@contextlib.contextmanager
def _cancelling(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Cancel the tasks that wait when the block ends."""
    try:
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def start_plan(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Path | Target = DEFAULT_TARGET,
    num_devices: int | None = None,
    memory_fraction: float | None = None,
    host_memory_bytes: int | None = None,
    in_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
    cache: Path | None = None,
) -> Callable[[IO[bytes]], MemoryPlan]:
    """Validate and trace; return a function that compiles until a pipe closes, in any thread.

    `cache` is a folder for compiled programs.
    """
    device = find_target(target)
    peak_rates = find_rates(device) if rates is None else rates
    fraction = resolve_memory_fraction(memory_fraction, device)
    if host_memory_bytes is not None:
        host_memory_bytes = as_integer("host_memory_bytes", host_memory_bytes, 1)
    if num_devices is not None:
        device.topology(as_integer("num_devices", num_devices, 1))
    find_compiler(device.platform)  # before the program is traced, which may take long
    lowered = lower(fun, args, num_devices, in_shardings, donate_argnums, static_argnums, device)
    # The number of devices may follow from the shardings.
    on_host = host_memory_bytes or device.host_bytes_per_device * lowered.num_devices or None

    compile_program = compile_for if cache is None else with_cache(compile_for, cache)

    def finish(pipe: IO[bytes]) -> MemoryPlan:
        program = compile_program(lowered, device, compiler_options, pipe)
        return _read_plan(program, device, fraction, on_host, peak_rates)

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
    module = parse(program.hlo)
    values = live_at_peak(program.buffer_assignment, program.live_ranges, target.platform)
    assigned, assigned_on_host = (
        allocated_bytes(program.buffer_assignment, target.platform, on_host)
        for on_host in (False, True)
    )
    if target.is_gpu:
        device, host = assigned, assigned_on_host
    elif program.refusal:
        device, host = assigned, assigned_on_host
        if not program.buffer_assignment:  # refused early
            device["temp"] = _read_refused_bytes(program.refusal)
    else:
        # The totals of a TPU program include memory on the chip. Without it they agree with the
        # bytes that the compiler states when it refuses a program.
        device, host = program.device_bytes | {"temp": assigned["temp"]}, program.host_bytes
    return MemoryPlan(
        target=target,
        num_devices=program.num_devices,
        memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes,
        device=_read_bytes(device),
        host=_read_bytes(host),
        constant_bytes=sum(value.bytes for value in values if value.kind == "constant"),
        peak_buffers=tuple(_read_buffer(value, module) for value in values),
        collectives=collectives(module),
        transfers=transfers(module),
        step_time=step_time(module, rates, program.num_devices),
        hlo=program.hlo,
        refusal=program.refusal,
    )


def _read_bytes(counts: dict[str, int]) -> Bytes:
    return Bytes(
        arguments=counts["argument"],
        outputs=counts["output"],
        temporaries=counts["temp"],
        aliased=counts["alias"],
        generated_code=counts["generated_code"],
    )


def _read_refused_bytes(message: str) -> int:
    """Return the bytes that a program needs by the message of the compiler that refused it."""
    size = re.search(r"\(([\d.]+)([KMGT])\)", message)
    return int(float(size[1]) * 2 ** (10 * (1 + "KMGT".index(size[2])))) if size else 0


def _read_buffer(value: Value, module: HloModule) -> Buffer:
    instruction = module.instruction_of(value.instruction)
    operation, lines = "", ("", "")
    if instruction is not None:
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        operation = name[1] if name else ""
        lines = module.source_and_caller(instruction)
    operation = operation or value.instruction
    return Buffer(value.shape, value.bytes, value.kind, operation, *lines, padding=value.padding)
