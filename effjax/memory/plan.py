"""Memory plans: compile a program for a GPU that is not attached, and read its memory use."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ..ops._common.arguments import as_integer, as_number
from ..ops.offload.compiled import host_memory_limit
from ._buffers import Value, live_at_peak
from ._compile import CompiledProgram, check_compiler, compile_for
from ._hlo import HloModule, collectives, parse, transfers
from ._lower import lower
from .render import format_bytes, progress_bar
from .results import Buffer, Bytes, Comparison, MemoryPlan
from .targets import Target, find_target


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
    """Compile a function for a GPU and return its memory use.

    The GPU need not exist on this machine, and nothing is computed: `args` may be shapes. The
    compiler runs in a separate process and leaves the caller's backend unchanged. It takes seconds
    for a small step and about a minute for a deep network. The peak, and whether it fits, are::

        peak = arguments + outputs − aliased + temporaries + code + constants
        fits = peak ≤ memory_fraction · GPU memory, and host bytes ≤ host_memory_bytes

    The program is the one that XLA runs on the GPU, with one exception: XLA picks convolution
    algorithms there by timing them, and a faster algorithm may need additional workspace. The CUDA
    context and libraries (some hundred megabytes) are not counted. To count other arrays of the
    process, pass them in `args`.

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
        memory_fraction: fraction of the GPU's memory that JAX reserves, in (0, 1]; set on the GPU
            with XLA_PYTHON_CLIENT_MEM_FRACTION. The default is JAX's.
        host_memory_bytes: pinned host memory of a process that uses all devices of the program. If
            None, `host_memory_limit()`.
        in_shardings: as in `jax.jit`. A PartitionSpec refers to a mesh of `num_devices` devices
            with one axis, `"data"`.
        donate_argnums: as in `jax.jit`.
        static_argnums: as in `jax.jit`.
        compiler_options: XLA flags for this program, by name without dashes.

    Returns:
        A `MemoryPlan`: bytes, largest buffers, collectives and transfers. It can be printed.

    Raises:
        TypeError: for nnx modules in a function that is not transformed by nnx, whose updates of
            the modules would be lost.
        ValueError: for an unknown target, a fraction outside (0, 1], a number of devices that the
            program does not span, or options of jit for a function that is jitted already.
        PlanError: if the compiler is not installed or cannot compile the program.
    """
    return _start_plan(
        fun, *args, target=target, num_devices=num_devices, memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes, in_shardings=in_shardings,
        donate_argnums=donate_argnums, static_argnums=static_argnums,
        compiler_options=compiler_options,
    )()  # fmt: skip


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

    Raises:
        ValueError: if there are no programs, or `args` that no program takes; and as `plan`.
        TypeError, PlanError: as `plan`.
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
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def submit(name: str) -> Future[tuple[MemoryPlan, float]]:
            # Trace in this thread: settings such as `jax.set_mesh` are thread-local.
            start = time.perf_counter()
            fun, *fun_args = steps[name]
            finish = _start_plan(fun, *fun_args, **options)
            return pool.submit(lambda: (finish(), time.perf_counter() - start))

        # The first program is traced before the progress bar starts, so that an error in the shared
        # options appears without it.
        futures = {submit(first): first}
        with progress_bar("compiling", len(steps), progress) as report:
            running = lambda: [name for f, name in futures.items() if f.running()]  # noqa: E731
            for name in others:
                report.run(running())
                futures[submit(name)] = name
            pending = set(futures)
            while pending:
                report.run(running())
                done, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    result, seconds = future.result()
                    size = format_bytes(result.peak_device_bytes)
                    report.finish(f"{futures[future]}: {size} at the peak, {seconds:.1f} s")
    return Comparison({name: future.result()[0] for future, name in futures.items()})


def _start_plan(
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
    """Validate and trace; return a function that compiles, which may run in any thread."""
    gpu = find_target(target)
    fraction = as_number("memory_fraction", memory_fraction, lambda f: 0 < f <= 1, "in (0, 1]")
    if host_memory_bytes is None:
        host_memory_bytes = host_memory_limit()
    on_host = as_integer("host_memory_bytes", host_memory_bytes, 1)
    check_compiler()
    lowered = lower(fun, args, num_devices, in_shardings, donate_argnums, static_argnums)
    return lambda: _read_plan(compile_for(lowered, gpu, compiler_options), gpu, fraction, on_host)


def _read_plan(
    program: CompiledProgram, target: Target, memory_fraction: float, host_memory_bytes: int
) -> MemoryPlan:
    module = parse(program.hlo)
    values = live_at_peak(program.buffer_assignment, program.live_ranges)
    return MemoryPlan(
        target=target,
        num_devices=program.num_devices,
        memory_fraction=memory_fraction,
        host_memory_bytes=host_memory_bytes,
        device=_read_bytes(program.device_bytes),
        host=_read_bytes(program.host_bytes),
        constant_bytes=sum(value.bytes for value in values if value.kind == "constant"),
        peak_buffers=tuple(_read_buffer(value, module) for value in values),
        collectives=collectives(module),
        transfers=transfers(module),
        hlo=program.hlo,
    )


def _read_bytes(counts: dict[str, int]) -> Bytes:
    return Bytes(
        arguments=counts["argument"],
        outputs=counts["output"],
        temporaries=counts["temp"],
        aliased=counts["alias"],
        generated_code=counts["generated_code"],
    )


def _read_buffer(value: Value, module: HloModule) -> Buffer:
    instruction = module.instruction_of(value.instruction)
    operation, lines = "", ("", "")
    if instruction is not None:
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        operation = name[1] if name else ""
        lines = module.source_and_caller(instruction)
    return Buffer(value.shape, value.bytes, value.kind, operation or value.instruction, *lines)
