"""Whole training steps on a GPU: time, the memory that was really taken, and what was planned.

Every program runs in a process of its own, without preallocation, so that its peak is its own.
`list` names them, `run NAME` is one of them, `all --json OUT` all, with peers in PyTorch where it
is installed. Not yet run on a GPU.
"""

import importlib.util
import json as json_of
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from ..memory import PlanError, plan
from ..train.images.config import Config
from ..train.images.forms import DENSENET_FORMS, training_steps
from ..train.lm.config import LMConfig
from ..train.lm.forms import LM_FORMS, lm_steps
from ._result import write_record
from .dense_block import BLOCKS, init, train_step

app = typer.Typer(no_args_is_help=True)
Step = tuple[Any, ...]  # (fn, *args), args by their shapes


def block(layers: int, form: str) -> Step:
    """A dense block on 32x32 maps at batch 64, growth rate 12."""
    shape = 64, 32, 32
    x, weights = (jax.ShapeDtypeStruct((*shape, c), "float32") for c in (24, 24 + 12 * layers))
    params = jax.eval_shape(lambda: init(layers, 12, 24))
    return jax.jit(train_step(BLOCKS[form])), params, x, weights


def densenet(model: str, side: int, classes: int, dtype: Any, form: str) -> Step:
    depth, growth_rate = (100, 12) if model == "densenet-bc" else (None, None)
    config = Config(model=model, depth=depth, growth_rate=growth_rate, dtype=dtype, batch_size=64)
    return training_steps(config, (side, side, 3), classes)(64)[form]


def language_model(layers: int, width: int, batch_size: int, form: str, dtype: Any) -> Step:
    config = LMConfig(
        layers=layers, width=width, heads=width // 128, context=1024, dtype=dtype, dropout=0.1
    )
    return lm_steps(config)(batch_size)[form]


def programs() -> dict[str, Callable[[], Step]]:
    """By name; nothing is traced before it is called."""
    found: dict[str, Callable[[], Step]] = {}
    for layers in (12, 24, 48):
        for form in BLOCKS:
            found[f"block {layers} {form}"] = lambda n=layers, f=form: block(n, f)
    for dtype in ("float32", "bfloat16"):
        for form in DENSENET_FORMS:
            small = "densenet-bc", 32, 10, dtype, form
            large = "densenet121", 224, 1000, dtype, form
            found[f"densenet-bc-100 {dtype} {form}"] = lambda a=small: densenet(*a)
            found[f"densenet121 {dtype} {form}"] = lambda a=large: densenet(*a)
        for form in LM_FORMS:
            found[f"lm 16x2048 {dtype} {form}"] = lambda f=form, d=dtype: language_model(
                16, 2048, 16, f, d
            )
    found["lm 20x4096 bfloat16 offload all, fused"] = lambda: language_model(
        20, 4096, 16, "offload all, fused", "bfloat16"
    )
    return found


def fill(args: Any) -> Any:
    """Arrays of these shapes where they belong: small positive numbers, which moments may be.

    What belongs on the host is made a slice at a time.
    """

    def array(path, a):
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            values = jnp.zeros(a.shape, a.dtype) if a.ndim == 0 else _integers(a)
            return values if a.sharding is None else jax.device_put(values, a.sharding)
        # Not `hash`, which Python salts anew in every process.
        key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
        make = lambda k, shape: 0.02 * jnp.abs(jax.random.normal(k, shape, a.dtype))  # noqa: E731
        if a.sharding is None:
            return make(key, a.shape)
        if a.sharding.memory_kind == "device" or a.ndim < 2:
            return jax.device_put(make(key, a.shape), a.sharding)
        from .. import host_init

        keys = jax.random.split(key, a.shape[0])
        return host_init(lambda k: make(k, a.shape[1:]), keys, shardings=a.sharding)

    return jax.tree_util.tree_map_with_path(array, args)


def _integers(a: Any) -> jax.Array:
    return jax.random.randint(jax.random.key(1), a.shape, 0, 10).astype(a.dtype)


@app.command("list")
def show() -> None:
    """Names the programs."""
    print("\n".join(programs()))


@app.command()
def run(name: str, rounds: int = 10, planned: bool = True) -> None:
    """Runs one program, and prints one line of JSON."""
    fn, *shapes = programs()[name]()
    row: dict[str, Any] = {"name": name}
    if planned:
        try:
            found = plan(fn, *shapes)
            row["planned_peak_bytes"] = found.peak_device_bytes
            row["planned_host_bytes"] = found.host.total
        except PlanError as error:
            row["not_planned"] = str(error)[:200]
    args = fill(shapes)
    has_state = hasattr(args[0], "_fields") or hasattr(args[0], "params")  # which is donated
    seconds = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        results = jax.block_until_ready(fn(*args))
        seconds.append(time.perf_counter() - start)
        if has_state:
            args[0] = results[0]
        del results
    row["seconds"] = statistics.median(seconds[2:])
    stats = jax.devices()[0].memory_stats() or {}
    row["peak_bytes_in_use"] = stats.get("peak_bytes_in_use")
    if row["peak_bytes_in_use"] and "planned_peak_bytes" in row:
        row["real_over_planned"] = row["peak_bytes_in_use"] / row["planned_peak_bytes"]
    print(json_of.dumps(row))


@app.command()
def torch(efficient: bool = False, half: bool = False, rounds: int = 10) -> None:
    """torchvision's DenseNet-121 at batch 64, plain or with its checkpointed layers."""
    import torch  # pyright: ignore[reportMissingImports]
    import torchvision  # pyright: ignore[reportMissingImports]

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = torchvision.models.densenet121(memory_efficient=efficient).cuda().train()
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (64,), device="cuda")
    seconds = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    name = f"densenet121 {'bfloat16' if half else 'tf32'} torch {'checkpoint' if efficient else ''}"
    row = {"name": name.strip(), "seconds": statistics.median(seconds[2:])}
    print(json_of.dumps(row | {"peak_bytes_in_use": torch.cuda.max_memory_allocated()}))


@app.command("all")
def run_all(
    only: Annotated[str, typer.Option(help="Programs whose names have this.")] = "",
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Runs every program in a process of its own; goes on where one fails."""
    commands = {name: ["run", name] for name in programs() if only in name}
    if importlib.util.find_spec("torchvision") and only in "densenet121 torch":
        for efficient in ("--efficient", "--no-efficient"):
            for half in ("--half", "--no-half"):
                commands[f"torch {efficient} {half}"] = ["torch", efficient, half]
    rows = []
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "120",
    }  # fmt: skip
    for name, command in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", "effjax.bench.h200_models", *command],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        try:
            rows.append(json_of.loads(done.stdout.strip().splitlines()[-1]))
        except (IndexError, ValueError):
            rows.append({"name": name, "failed": done.stderr[-1000:]})
        print(rows[-1], flush=True)
    if json:
        write_record(json / "models_gpu.json", "training steps on a GPU", {}, rows)


if __name__ == "__main__":
    app()
