"""deform_conv2d's CUDA kernels: right, and timed beside torchvision's in the same process.

Not yet run on a GPU. Rates are of what must be moved and multiplied, beside those of a copy and of
a matrix product measured in the same run.
"""

import importlib.util
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effjax

from ._measure import difference, time_in_turn
from ._result import write_record

SHAPES = (8, 100, 168, 128), (8, 50, 84, 256), (8, 25, 42, 512), (64, 56, 56, 256)
# Ours and torchvision's dtype; whether matrix products may round to TF32.
MODES = {
    "float32": ("float32", "float32", False),
    "tf32": ("float32", "float32", True),
    "half": ("bfloat16", "float16", True),
}


class Case(NamedTuple):
    shape: tuple[int, int, int, int]  # [N, H, W, C], C outputs
    mode: str
    masked: bool = True
    offset_groups: int = 1

    @property
    def pixels(self) -> int:
        return math.prod(self.shape[:3])

    def flops(self, backward: bool) -> float:
        return 2 * self.pixels * 9 * self.shape[-1] ** 2 * (3 if backward else 1)

    def least_bytes(self, backward: bool) -> float:
        """x, y, offsets and mask once each; their gradients too, with backward."""
        size = np.dtype(jnp.dtype(MODES[self.mode][0])).itemsize
        taps = 9 * self.offset_groups * (3 if self.masked else 2)
        once = self.pixels * (2 * self.shape[-1] * size + taps * 4)
        return once * (3 if backward else 1)


def operands(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    n, h, w, c = case.shape
    taps = 9 * case.offset_groups
    found = {
        "x": rng.standard_normal((n, h, w, c), np.float32),
        "offset": 2 * rng.standard_normal((n, h, w, 2 * taps), np.float32),
        "kernel": rng.standard_normal((3, 3, c, c), np.float32) / (3 * math.sqrt(c)),
        "dy": rng.standard_normal((n, h, w, c), np.float32),
    }
    if case.masked:
        found["mask"] = rng.random((n, h, w, taps), np.float32)
    return found


def ours(case: Case, implementation: Any, backward: bool, **options: Any) -> Callable:
    precision = "tensorfloat32" if MODES[case.mode][2] else "highest"

    def conv(x, offset, kernel, mask=None):
        return effjax.deform_conv2d(
            x, offset, kernel, mask, padding=1, precision=precision,
            implementation=implementation, **options,
        )  # fmt: skip

    def run(operands):
        args = [operands[k] for k in ("x", "offset", "kernel", "mask") if k in operands]
        if not backward:
            return conv(*args)
        y, pull = jax.vjp(conv, *args)
        return y, *pull(operands["dy"])

    return jax.jit(run)


def on_device(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """As a network has them, cast before anything is timed, as torchvision's are: positions and
    masks in float32, which the kernels compute them in."""
    wide = {"offset", "mask"}
    dtypes = {name: "float32" if name in wide else MODES[case.mode][0] for name in arrays}
    return {name: jnp.asarray(a, dtypes[name]) for name, a in arrays.items()}


def torchvision(case: Case, arrays: dict[str, np.ndarray], backward: bool) -> Callable:
    """The same by torchvision; waits for the GPU, and returns nothing."""
    import torch  # pyright: ignore[reportMissingImports]
    from torchvision.ops import deform_conv2d  # pyright: ignore[reportMissingImports]

    _, dtype, tf32 = MODES[case.mode]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    place = "cuda" if torch.cuda.is_available() else "cpu"
    order = {"kernel": (3, 2, 0, 1)}
    tensors = {
        name: torch.tensor(a.transpose(order.get(name, (0, 3, 1, 2)))).contiguous()
        .to(place, getattr(torch, dtype)).requires_grad_(backward and name != "dy")
        for name, a in arrays.items()
    }  # fmt: skip

    def run():
        t = tensors
        y = deform_conv2d(t["x"], t["offset"], t["kernel"], padding=1, mask=t.get("mask"))
        if backward:
            leaves = [v for k, v in t.items() if k != "dy"]
            torch.autograd.grad(y, leaves, t["dy"])
        if place == "cuda":
            torch.cuda.synchronize()

    return run


def check() -> None:
    """Small odd cases against XLA in float64, NaN and huge offsets among them; and sharded."""
    jax.config.update("jax_enable_x64", True)
    for mode, masked, groups, det in itertools.product(MODES, (True, False), (1, 2), (False, True)):
        case = Case((3, 7, 9, 12), mode, masked, groups)
        arrays = operands(case)
        arrays["offset"][0, 0, 0, :6] = [np.nan, np.inf, -np.inf, 1e30, -1e30, -1]
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), arrays)
        exact = ours(case._replace(mode="float32"), "xla", True)
        want = jax.tree.map(lambda a: a.astype(jnp.float32), _in_float64(case, wide))
        limit = {"float32": 1e-5, "tf32": 5e-3, "half": 3e-2}[mode]
        for implementation in ("native", "native" if det else "fused"):
            run = ours(case, implementation, True, deterministic=det)
            got = run(on_device(case, arrays))
            worst = difference(got, want)
            assert worst <= limit, (implementation, case, det, worst)
        assert difference(exact(jax.tree.map(jnp.asarray, arrays)), want) <= 1e-5
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    case = Case((2, 8, 8, 16), "float32")
    arrays = jax.device_put(operands(case), NamedSharding(mesh, P()))
    want = ours(case, "native", False)(arrays)
    specs = {k: P("data") if k != "kernel" else P() for k in arrays}
    mapped = jax.shard_map(
        ours(case, "native", False), mesh=mesh, in_specs=(specs,), out_specs=P("data")
    )
    assert difference(jax.jit(mapped)(arrays), want) == 0
    jax.config.update("jax_enable_x64", False)
    print("right: all modes against float64, deterministic and not, and inside shard_map")


def _in_float64(case: Case, wide: dict[str, jax.Array]) -> Any:
    def conv(x, offset, kernel, mask=None):
        return effjax.deform_conv2d(x, offset, kernel, mask, padding=1, implementation="xla")

    args = [wide[k] for k in ("x", "offset", "kernel", "mask") if k in wide]
    y, pull = jax.vjp(conv, *args)
    return y, *pull(wide["dy"])


def ceilings(rounds: int) -> dict[str, float]:
    """GB/s of a copy, bytes read and written, and TFLOP/s of products of 8192 x 8192."""
    found = {}
    for name, dtype, precision in (
        ("float32", "float32", "highest"), ("tf32", "float32", "tensorfloat32"),
        ("half", "bfloat16", None),
    ):  # fmt: skip
        a = jax.random.normal(jax.random.key(0), (8192, 8192), dtype)
        product = jax.jit(lambda a, p=precision: jnp.matmul(a, a, precision=p))
        jax.block_until_ready(product(a))
        seconds = time_in_turn({"p": lambda: product(a)}, reference="p", rounds=rounds)  # noqa: B023
        found[f"{name}_tflops"] = 2 * 8192**3 / seconds["p"]["seconds"] / 1e12
    a = jnp.ones((2**28,), jnp.float32) * 1.5
    copy = jax.jit(lambda a: a + 1)
    jax.block_until_ready(copy(a))
    seconds = time_in_turn({"c": lambda: copy(a)}, reference="c", rounds=rounds)
    found["copy_gbps"] = 2 * a.nbytes / seconds["c"]["seconds"] / 1e9
    return found


def device_seconds(run: Callable, rounds: int) -> float | None:
    """The time of a run's kernels on the GPU, without the gaps between them: by CUPTI, which sees
    those of PyTorch too. None where there is no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                jax.block_until_ready(run())
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    lines = [x for p in planes if p.name.startswith("/device:GPU") for x in p.lines]
    events = [e for x in lines if x.name.startswith("Stream") for e in x.events]
    return sum(event.duration_ns for event in events) / 1e9 / rounds if events else None


def time_case(case: Case, backward: bool, rounds: int) -> list[dict[str, Any]]:
    arrays = operands(case)
    given = on_device(case, arrays)
    programs = {
        "effjax native": ours(case, "native", backward),
        "effjax native, slices in L2": ours(case, "native", backward, workspace_bytes=32 * 2**20),
        "effjax fused": ours(case, "fused", backward),
        "effjax native, deterministic": ours(case, "native", backward, deterministic=True),
        "effjax xla": ours(case, "xla", backward),
    }
    if not backward:
        del programs["effjax native, deterministic"]
    runs: dict[str, Callable] = {n: (lambda p=p: p(given)) for n, p in programs.items()}
    reference = "effjax xla"
    if importlib.util.find_spec("torchvision"):
        reference = "torchvision"
        runs[reference] = torchvision(case, arrays, backward)
    for run in runs.values():
        jax.block_until_ready(run())
    rows = []
    for name, found in time_in_turn(runs, reference=reference, rounds=rounds).items():
        rows.append(
            {"name": name, "shape": case.shape, "mode": case.mode, "masked": case.masked}
            | {"offset_groups": case.offset_groups, "backward": backward} | found
            | {"device_seconds": device_seconds(runs[name], rounds)}
            | {"speedup": round(1 / found["ratio"], 2)}
            | {"tflops": round(case.flops(backward) / found["seconds"] / 1e12, 2)}
            | {"least_gbps": round(case.least_bytes(backward) / found["seconds"] / 1e9, 1)}
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main(
    rounds: Annotated[int, typer.Option(help="Timed runs of each program, in turn.")] = 20,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Small cases, no times.")
    ] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes, to try the script.")] = False,
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Checks the kernels, then times them beside torchvision's."""
    check()
    if check_only:
        return
    shapes = ((2, 10, 12, 16),) if tiny else SHAPES
    limits = {} if tiny else ceilings(rounds)
    print(limits)
    cases = [Case(shape, mode) for shape in shapes for mode in MODES]
    cases += [Case(shapes[0], m, masked=False) for m in MODES]
    cases += [Case(shapes[0], m, offset_groups=4) for m in MODES]
    rows = [r for case in cases for b in (False, True) for r in time_case(case, b, rounds)]
    if json:
        config = {"rounds": rounds, "ceilings": limits}
        title = "deform_conv2d beside torchvision's CUDA operator"
        write_record(json / "deform_conv_gpu.json", title, config, rows)


if __name__ == "__main__":
    typer.run(main)
