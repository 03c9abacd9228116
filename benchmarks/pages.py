"""Tables of the documentation, written from the JSON files of `docs/measured`.

`python -m benchmarks.pages` rewrites them in the pages of `docs`, between `<!-- table NAME -->` and
`<!-- end -->`.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .measure import fit_exponent

DOCS = Path(__file__).parent.parent / "docs"
MEASURED = DOCS / "measured"
Row = dict[str, Any]
Cells = list[str]


def read(file: str) -> Row:
    """Return the content of a JSON file in `docs/measured`."""
    return json.loads((MEASURED / file).read_text())


def by_name(file: str) -> dict[str, Row]:
    """Return the rows of a file by name; the deepest model wins."""
    return {row["name"]: row for row in read(file)["rows"]}


def grouped(file: str, key: str = "name") -> dict[str, list[Row]]:
    """Return lists of the rows of a file that agree in a column."""
    groups: dict[str, list[Row]] = {}
    for row in read(file)["rows"]:
        groups.setdefault(row[key], []).append(row)
    return groups


def megabytes(row: Row, key: str) -> str:
    return f"{row[f'{key}_bytes'] / 1e6:.0f}"


def gigabytes(row: Row, key: str, digits: int = 1) -> str:
    return f"{row[f'{key}_bytes'] / 1e9:.{digits}f}"


def milliseconds(seconds: float, digits: int = 0) -> str:
    return f"{1e3 * seconds:.{digits}f}"


def show(name: str, ours: bool = False) -> str:
    """Return the name of a program in Markdown, with code, and in bold if it is effjax's."""
    name = name.replace("checkpoint a ", "checkpoint per ")
    name = re.sub(r'jax\.checkpoint|\w+=("\w+"|\w+)|lax\.scan|"xla"', r"`\g<0>`", name)
    return f"**{name}**" if ours else re.sub(r"^effjax[\w.]*", r"**\g<0>**", name)


# Each function yields the header of a table, and then its rows.


def peak_by_depth() -> Iterator[Cells]:
    files = MEASURED.glob("planned/memory_block_*_h200.json")
    depths = sorted(int(file.stem.split("_")[2]) for file in files)
    by_depth = [by_name(f"planned/memory_block_{depth}_h200.json") for depth in depths]
    yield ["", *map(str, depths), "exponent"]
    for name in by_depth[-1]:
        peaks = [rows[name]["peak_bytes"] for rows in by_depth]
        exponent = fit_exponent(depths, peaks)
        yield [show(name), *(megabytes(rows[name], "peak") for rows in by_depth), f"{exponent:.2f}"]


def kept_by_depth() -> Iterator[Cells]:
    groups = grouped("growth/depth_kept.json")
    yield ["", *(str(row["layers"]) for row in next(iter(groups.values()))), "exponent"]
    for name, rows in groups.items():
        kept = (megabytes(row, "kept") for row in rows)
        yield [show(name), *kept, f"{rows[-1]['exponent']:.2f}"]


def dense_block() -> Iterator[Cells]:
    planned = by_name("planned/memory_block_48_h200.json")
    fast, slow = (by_name(f"cpu/dense_block_{n}_float32.json") for n in (24, 48))
    yield [
        "", "H200, 48 layers [MB]", "CPU, 24 layers", "CPU, 48 layers", "CPU, 48 layers [MB]"
    ]  # fmt: skip
    for name in fast:
        ratios = (f"{rows[name]['ratio']:.2f}×" for rows in (fast, slow))
        if name in planned:
            first, last = (megabytes(rows[name], "temp") for rows in (planned, slow))
        else:
            first = last = ""  # PyTorch, whose memory is not known
        yield [show(name), first, *ratios, last]


def densenet() -> Iterator[Cells]:
    names = ["plain, Flax's BatchNorm", "jax.checkpoint a layer"]
    names += ['effjax save="conv"', 'effjax save="features"']
    yield ["", "peak [MB]"]
    rows = read("planned/memory_densenet_100_h200.json")["rows"]
    for name, row in zip(names, rows, strict=True):
        yield [show(name), megabytes(row, "peak")]


def batch_norm() -> Iterator[Cells]:
    half, single = (by_name(f"cpu/batch_norm_{dtype}.json") for dtype in ("bfloat16", "float32"))
    yield ["", "float32", "bfloat16", "kept, float32", "kept, bfloat16"]
    for name in single:
        both = single[name], half[name]
        times = (f"{row['ratio']:.2f}×" for row in both)
        yield [show(name), *times, *(f"{row['kept']}" for row in both)]


def batch_norm_layers() -> Iterator[Cells]:
    rows = by_name("planned/batch_norm_layers_float32_h200.json")
    yield ["", "Flax, peak", "effjax, peak", "Flax, kept", "effjax, kept"]
    for form, shown in {
        "one after the other": "one after the other, in one `jit`",
        "in lax.scan": "in `lax.scan`",
        "in jax.checkpoint": "in `jax.checkpoint`",
        "in jax.checkpoint, all saved": "in `jax.checkpoint`, with `everything_saveable`",
    }.items():
        both = [rows[f"{name}, {form}"] for name in ("Flax BatchNorm", "effjax.sync_batch_norm")]
        peaks = (megabytes(row, "peak") for row in both)
        yield [shown, *peaks, *(f"{row['kept']:.0f}" for row in both)]


def cross_entropy() -> Iterator[Cells]:
    yield ["", "head, 16", "head, 64", "model, 16", "model, 64"]
    for name, rows in grouped("planned/cross_entropy_32768_h200.json").items():
        rows = sorted(rows, key=lambda row: row["of"])
        yield [show(name), *(megabytes(row, "peak") for row in rows)]


def deform_conv() -> Iterator[Cells]:
    yield [
        "batch × height × width × channels", "torchvision", "plain XLA", 'effjax, `"xla"`',
        "**effjax, native**", "matrix products alone", "**torchvision / native**",
    ]  # fmt: skip
    for shape in ("2x56x56x64", "2x25x42x256", "2x50x84x128", "8x56x56x64"):
        for groups in (1, 4) if shape == "2x50x84x128" else (1,):
            file = f"cpu/deform_conv_{shape}_{groups}_forward"
            files = f"{file}.json", f"{file}_backward.json"
            names = "torchvision", "plain XLA", "effjax xla", "effjax native"
            yield [
                shape.replace("x", " × ") if groups == 1 else "the same, 4 offset groups",
                *(passes_milliseconds(name, files) for name in (*names, "matrix products alone")),
                " / ".join(map(faster_than_torchvision, files)),
            ]


def passes_milliseconds(name: str, files: tuple[str, ...]) -> str:
    """Return the times of a program in several files, without those that do not have it."""
    rows = (by_name(file).get(name) for file in files)
    return " / ".join(milliseconds(row["seconds"]) for row in rows if row)


def faster_than_torchvision(file: str) -> str:
    """Return the quartiles, over the rounds, of torchvision's time relative to native code's."""
    low, high = by_name(file)["effjax native"]["ratio_quartiles"]
    low, high = f"{1 / high:.0f}", f"{1 / low:.0f}"
    return f"{low}×" if low == high else f"{low}–{high}×"


def deform_attention() -> Iterator[Cells]:
    queries = 300, 22223
    columns = [f"{n} queries" for n in queries]
    yield ["", *columns, *(f"{column} [MB]" for column in columns)]
    for name in ("packed gather", "effjax xla", "effjax native"):
        files = (f"cpu/deform_attention_{n}_forward" for n in queries)
        times = (passes_milliseconds(name, (f"{f}.json", f"{f}_backward.json")) for f in files)
        plans = (by_name(f"planned/deform_attention_{n}_h200.json")[name] for n in queries)
        yield [show(name), *times, *(megabytes(plan, "temp") for plan in plans)]


def roi() -> Iterator[Cells]:
    yield [
        "samples along each axis of a bin", "cores", "torchvision", 'effjax, `"xla"`',
        "**effjax, native**", "torchvision / native",
    ]  # fmt: skip
    for ratio, threads in itertools.product((2, 0), (2, 1)):
        file = f"cpu/roi_align_{ratio}_{threads}_forward"
        files = f"{file}.json", f"{file}_backward.json"
        names = "torchvision", "effjax xla", "effjax native"
        times = (passes_milliseconds(name, files) for name in names)
        faster = (f"{1 / by_name(file)['effjax native']['ratio']:.1f}×" for file in files)
        yield [{2: "2", 0: "one per pixel"}[ratio], str(threads), *times, " / ".join(faster)]


def gpu_sampling() -> Iterator[Cells]:
    programs = "plain XLA", "effjax xla", "effjax native"
    yield ["", "plain XLA", *map(show, programs[1:]), '`"xla"` / native']
    for operator, rows in grouped("planned/gpu_sampling_h100.json", "of").items():
        times: dict[str, list[float]] = {}
        for row in rows:
            name = programs[0] if row["name"] == "packed gather" else row["name"]
            times.setdefault(name, []).append(row["step_seconds"])
        # Slashes separate forward, and forward and backward.
        cells = (" / ".join(f"{1e6 * t:.0f}" for t in times.get(name, ())) for name in programs)
        xla, native = (times[name] for name in programs[1:])
        faster = (f"{a / b:.1f}×" for a, b in zip(xla, native, strict=True))
        yield [operator.replace("x", " × "), *cells, " / ".join(faster)]


def packed_rows() -> Iterator[Cells]:
    yield ["", "", "kernels [s]", "products alone [s]", "step [s]", "tokens/s"]
    names = {"rtx4090": "RTX 4090", "h100": "H100"}
    for row in read("planned/packed_rows_qwen3_8b.json")["rows"]:
        seconds = (f"{row[f'{key}_seconds']:.1f}" for key in ("compute", "products", "step"))
        yield [names[row["of"]], row["name"], *seconds, f"{row['tokens_per_second']:.0f}"]


def sass() -> Iterator[Cells]:
    yield ["kernel", "instructions", "budget", "loads in flight", "registers"]
    for name, row in by_name("planned/cuda_sass.json").items():
        kernel, dtype, architecture = name.split(", ")
        if dtype != "float16" and architecture == "sm_90":
            counts = (str(row[key]) for key in ("budget", "loads_in_flight", "registers"))
            yield [f"{kernel}, {dtype}", f"{row['per_pack']:.0f}", *counts]


def offload_by_depth() -> Iterator[Cells]:
    groups = grouped("planned/offload_adam_1024_float32_h200.json")
    depths = [str(row["layers"]) for row in next(iter(groups.values()))]
    yield ["", *depths, f"host, {depths[-1]}"]
    for name, rows in groups.items():
        device = (gigabytes(row, "planned_device", 2) for row in rows)
        shown = "jax.checkpoint a layer" if name == "in memory, remat" else name
        host = gigabytes(rows[-1], "planned_host", 2)
        yield [show(shown, name == "all offloaded, fused update"), *device, host]


def fused_update() -> Iterator[Cells]:
    yield ["", "Adam, 8", "Adam, 32", "SGD, 8", "SGD, 32"]
    for name, shown in {
        "in memory, remat": "`jax.checkpoint` per layer, then optax",
        "in memory, fused update": "**updated in the backward pass**",
    }.items():
        files = (f"planned/offload_{tx}_1024_float32_h200.json" for tx in ("adam", "sgd"))
        rows = [row for file in files for row in grouped(file)[name] if row["layers"] in (8, 32)]
        yield [shown, *(gigabytes(row, "planned_device", 2) for row in rows)]


def offload_peers() -> Iterator[Cells]:
    file = "planned/offload_peers_h200.json"
    ours = read(file)["ours"]
    yield ["", "device", "relative to the first row", "host"]
    for name, row in by_name(file).items():
        device, host = (gigabytes(row, f"planned_{where}") for where in ("device", "host"))
        yield [show(name, name in ours), device, f"{row['ratio']:.3f}", host]


def offload_gh200() -> Iterator[Cells]:
    file = "planned/offload_bracket_gh200.json"
    ours, groups = read(file)["ours"], grouped(file)
    sizes = [f"{row['parameters'] / 1e9:.2f} B" for row in next(iter(groups.values()))]
    yield ["", *sizes, *(f"host, {size}" for size in sizes)]
    for name, rows in groups.items():
        places = itertools.product(("planned_device", "planned_host"), rows)
        yield [show(name, name in ours), *(gigabytes(row, place) for place, row in places)]


def offload_largest() -> Iterator[Cells]:
    yield ["host [GB]", "layers", "billion parameters", "host, planned", "device, planned"]
    for row in read("planned/offload_largest_gh200.json")["rows"]:
        size = f"{row['layers']} of width {row['width']}", f"{row['parameters'] / 1e9:.1f}"
        planned = (gigabytes(row, f"planned_{where}") for where in ("host", "device"))
        yield [gigabytes(row, "host", 0), *size, *planned]


# Memory and copies of language models, in bytes.
LANGUAGE_MODEL = "planned_device", "planned_host", "to_device", "to_host"


def language_model() -> Iterator[Cells]:
    file = "planned/language_model_h100.json"
    ours = read(file)["ours"]
    yield ["", "device", "host", "to the device", "to the host"]
    for name, row in by_name(file).items():
        yield [show(name, name in ours), *(gigabytes(row, key) for key in LANGUAGE_MODEL)]


def host_bytes() -> Iterator[Cells]:
    yield ["", "host [GB]", "bytes per parameter", "to the device [GB]", "to the host [GB]"]
    for name, row in by_name("planned/language_model_h100.json").items():
        if name.endswith("others on the host"):
            host, *traffic = (gigabytes(row, key) for key in LANGUAGE_MODEL[1:])
            per_parameter = f"{row['planned_host_bytes'] / row['parameters']:.2f}"
            yield [name.split(",")[0], host, per_parameter, *traffic]


def fine_tuning(gpu: str) -> Iterator[Cells]:
    """Yield the table of a GPU; a cell has the numbers of float32 and of 8-bit moments.

    † marks more memory than there is.
    """
    yield [
        "", "tokens", "moments", "state in", "device", "host", "to the device", "to the host",
        "step [s]", "tokens/s", "of peak [%]",
    ]  # fmt: skip
    for model in ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.3-70B"):
        name = model.lower().replace("-", "_").replace(".", "_")
        cells: dict[int, dict[str, Row]] = {}
        for row in read(f"planned/language_model_table_{name}.json")["rows"]:
            if row["gpu"] == gpu and row["chosen"]:
                cells.setdefault(row["tokens"], {})[row["moments"]] = row
        for tokens, by_moments in cells.items():
            columns = zip(*map(fine_tuning_cells, by_moments.values()), strict=True)
            yield [model, f"{tokens}", *(" / ".join(dict.fromkeys(c)) for c in columns)]


def fine_tuning_cells(row: Row) -> Cells:
    fits = row["fits_device"] and row["fits_host"]
    device, host, *traffic = (gigabytes(row, key) for key in LANGUAGE_MODEL)
    return [
        row["moments"],
        row["memory"],
        device + "†" * (not row["fits_device"]),
        host + "†" * (not row["fits_host"]),
        *traffic,
        three_digits(row["step_seconds"]) if fits else "–",
        f"{row['tokens_per_second']:.0f}" if fits else "–",
        f"{100 * row['peak_share']:.0f}" if fits else "–",
    ]


def my_gpu() -> Iterator[Cells]:
    yield ["GPU", "model", "state", "host", "device", "s a step", "tokens/s", "options"]
    for gpu, model, _, *cells in gpu_rows("planned/finetune.json"):
        yield [gpu, model, *cells]


def my_gpu_batches() -> Iterator[Cells]:
    yield ["GPU", "model", "sequences", "host", "device", "s a step", "tokens/s", "options"]
    for gpu, model, batch, _, *cells in gpu_rows("planned/finetune_batches.json"):
        yield [gpu, model, batch, *cells]


def gpu_rows(path: str) -> Iterator[Cells]:
    """Yield a row for each GPU, model and batch; a cell has the numbers of AdamW and 8-bit moments.

    † marks a form that exceeds the memory of the device.
    """
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in read(path)["rows"]:
        groups.setdefault((row["gpu"], row["model"], row["batch_size"]), []).append(row)
    gpus = [*read(path)["gpus"]]
    models = [*dict.fromkeys(model for _, model, _ in groups)]

    def place(key: tuple[str, str, int]) -> tuple[int, int, int]:
        gpu, model, batch = key
        return gpus.index(gpu), models.index(model), batch

    for key in sorted(groups, key=place):
        rows = groups[key]
        columns = (
            (gigabytes(row, "state") for row in rows),
            (gigabytes(row, "planned_host") for row in rows),
            (gigabytes(row, "planned_device") + "†" * (not row["fits"]) for row in rows),
            (three_digits(row["step_seconds"]) for row in rows),
            (f"{row['tokens_per_second']:.0f}" for row in rows),
            (f"`{row['options']}`" for row in rows),
        )
        yield [*map(str, key), *(" / ".join(dict.fromkeys(column)) for column in columns)]


def my_quantized_gpu() -> Iterator[Cells]:
    yield ["model", "weights", "state", "host", "device", "s a step", "tokens/s", "options"]
    for row in read("planned/finetune_quantized.json")["rows"]:
        sizes = (gigabytes(row, key) for key in ("state", "planned_host", "planned_device"))
        yield [
            row["model"], row["weights"], *sizes, three_digits(row["step_seconds"]),
            f"{row['tokens_per_second']:.0f}", f"`{row['options']}`",
        ]  # fmt: skip


def published() -> Iterator[Cells]:
    header = ["model", "GPU", "sequences", "measured [tokens/s]", "modelled [tokens/s]"]
    yield [*header, "share of the peak", "factor"]
    for row in read("planned/published.json")["rows"]:
        speeds = (f"{row[key]:.0f}" for key in ("measured_tokens_per_second", "tokens_per_second"))
        ratio = row["ratio"]
        cells = row["model"], row["target"], str(row["batch_size"]), *speeds
        yield [*cells, f"{1 / ratio:.0%}", f"{ratio:.2f}"]


def published_tpu() -> Iterator[Cells]:
    yield ["slices of 256 chips", "measured [TFLOP/s/chip]", "step [s]", "products [s]", "factor"]
    for row in read("planned/published_tpu.json")["rows"]:
        seconds = (f"{row[key]:.2f}" for key in ("measured_seconds", "product_seconds"))
        tflops = f"{row['measured_tflops']:.0f}"
        yield [str(row["slices"]), tflops, *seconds, f"{row['ratio']:.2f}"]


def published_memory() -> Iterator[Cells]:
    columns = "temporaries, printed", "planned", "in all, printed", "planned"
    yield ["program", *columns, "ratio"]
    keys = (
        "printed_temporary_bytes", "planned_temporary_bytes", "printed_bytes",
        "planned_device_bytes",
    )  # fmt: skip
    for row in read("planned/published_memory.json")["rows"]:
        unit = row["unit_bytes"]
        name = "MiB" if unit == 2**20 else "GiB"
        cells = (f"{row[key] / unit:.2f} {name}" for key in keys)
        yield [row["name"], *cells, f"{row['ratio']:.2f}"]


def run_memory() -> Iterator[Cells]:
    yield ["model", "parameters in", "phase", "resident [GB]", "expected [GB]", "ratio"]
    for row in read("cpu/run_memory.json")["rows"]:
        sizes = (gigabytes(row, key, 2) for key in ("resident", "expected"))
        yield [row["model"], row["params_in"], row["phase"], *sizes, f"{row['ratio']:.2f}"]


def checkpoint_memory() -> Iterator[Cells]:
    yield ["handlers", "saving [GiB]", "restoring [GiB]"]
    for row in read("cpu/checkpoint_memory.json")["rows"]:
        sizes = (f"{row[f'{key}_bytes'] / 2**30:.2f}" for key in ("save", "restore"))
        yield [show(row["name"]), *sizes]


def same_as_trl() -> Iterator[Cells]:
    yield ["", "TRL, first step", "TRL, tenth", "effjax, tenth", "largest difference"]
    for row in read("cpu/trl.json")["rows"]:
        losses = row["trl_losses"][0], row["trl_losses"][-1], row["losses"][-1]
        yield [row["name"], *(f"{loss:.4f}" for loss in losses), f"{row['difference']:.0e}"]


def torch_loop() -> Iterator[Cells]:
    yield ["", "loss, first step", "tenth", "twentieth", "largest difference"]
    for row in read("cpu/torch_loop.json")["rows"]:
        losses = (f"{row['losses'][i]:.4f}" for i in (0, 9, 19))
        difference = f"{row['difference']:.0e}" if "difference" in row else ""
        yield [row["name"], *losses, difference]


def three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def overlap() -> Iterator[Cells]:
    yield ["device and batch", "at best [ms]", "modelled [ms]", "ratio"]
    for name, row in by_name("planned/offload_overlap.json").items():
        seconds = (milliseconds(row[key], 1) for key in ("best_seconds", "step_seconds"))
        yield [name.removeprefix("effjax, "), *seconds, f"{row['ratio']:.2f}"]


def clipping() -> Iterator[Cells]:
    yield ["update of the layers", "GPU", "kernels [ms]", "modelled [ms]", "ratio"]
    for name, row in by_name("planned/clipping.json").items():
        seconds = (milliseconds(row[key], 1) for key in ("compute_seconds", "step_seconds"))
        form = name.removesuffix(f", {row['gpu']}")
        yield [form, row["gpu"], *seconds, f"{row['ratio']:.2f}"]


def resnet() -> Iterator[Cells]:
    yield ["", "peak (GB)", "relative to Flax"]
    for name, row in by_name("planned/resnet50_256_h200.json").items():
        yield [show(name), gigabytes(row, "peak", 2), f"{row['ratio']:.2f}"]


def optimizer_losses() -> Iterator[Cells]:
    yield ["", "test loss", "quartiles of the seeds"]
    for name, row in by_name("cpu/optimizers.json").items():
        low, high = row["loss_quartiles"]
        yield [show(name), f"{row['loss']:.3f}", f"{low:.3f}–{high:.3f}"]


def optimizer_master_copies() -> Iterator[Cells]:
    yield ["", "losses of the seeds", "relative to float32 Adam"]
    rows = by_name("cpu/optimizers_24_bits.json")
    reference = rows["plain float32 Adam"]["losses"]
    for name, row in rows.items():
        pairs = zip(row["losses"], reference, strict=True)
        changes = ", ".join(f"{100 * (loss / of - 1):+.2f} %" for loss, of in pairs)
        yield [show(name), ", ".join(f"{a:.4f}" for a in row["losses"]), changes]


def optimizer_memory() -> Iterator[Cells]:
    yield ["", "peak [GB]", "temporaries [GB]", "temporaries per parameter"]
    for name, row in by_name("planned/optimizers_matrix_h100.json").items():
        sizes = (gigabytes(row, key, 2) for key in ("peak", "temp"))
        yield [show(name), *sizes, f"{row['temp_bytes_per_parameter']:.2f}"]


def fit() -> Iterator[Cells]:
    yield ["network", "budget", "options", "peak", "step, modelled", "of one setting", "compiled"]
    for file in sorted(MEASURED.glob("planned/fit_*_h200.json")):
        network = file.stem.split("_")[1]
        for row in json.loads(file.read_text())["rows"]:
            options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
            size = f"{gigabytes(row, 'planned_device', 2)} GB"
            cost = size, f"{milliseconds(row['step_seconds'], 1)} ms", f"{row['ratio']:.2f}"
            yield [network, row["name"], options, *cost, str(row["compiled"])]


def tpu_memory() -> Iterator[Cells]:
    yield ["", "plain JAX", "`jax.checkpoint`", "**effjax**", "effjax, host"]
    for name in ("tpu_memory", "tpu_offload", "tpu_sampling"):
        for program, group in grouped(f"planned/{name}_v5e.json", "of").items():
            rows, cells = {row["name"]: row for row in group}, []
            for form in ("plain JAX", "jax.checkpoint", "effjax"):
                if not (row := rows.get(form)):
                    cells.append("")
                elif not row["fits"]:
                    cells.append("refused")
                else:
                    cells.append(f"{megabytes(row, 'peak')} ({megabytes(row, 'temp')})")
            shown = f"`{program}`" if name == "tpu_sampling" else program
            yield [shown, *cells, megabytes(rows["effjax"], "planned_host")]


def tpu_traffic() -> Iterator[Cells]:
    groups = grouped("planned/tpu_traffic_v5e.json")
    operators = dict.fromkeys(row["of"] for row in next(iter(groups.values())))
    yield ["", *(f"`{operator}`" for operator in operators)]
    for name, rows in groups.items():
        passes = ([r for r in rows if r["of"] == operator] for operator in operators)
        cells = (" / ".join(megabytes(row, "traffic") for row in both) for both in passes)
        yield [show(name), *cells]


def tpu_all_reduces() -> Iterator[Cells]:
    yield ["", "forward", "both passes"]
    for name, rows in grouped("planned/tpu_sync_batch_norm_v5e.json").items():
        yield [show(name), *(str(row["all_reduces"]) for row in rows)]


TABLES: dict[str, Callable[[], Iterator[Cells]]] = {
    **{
        function.__name__: function
        for function in (
            peak_by_depth, kept_by_depth, dense_block, densenet, batch_norm, batch_norm_layers,
            cross_entropy, deform_conv, deform_attention, roi, gpu_sampling, sass, offload_by_depth,
            fused_update, offload_peers, offload_gh200, offload_largest, language_model, host_bytes,
            overlap, clipping, resnet, optimizer_losses, optimizer_master_copies, optimizer_memory,
            packed_rows, fit, tpu_memory, tpu_traffic, tpu_all_reduces,
            my_gpu, my_gpu_batches, my_quantized_gpu, published, published_tpu, published_memory,
            run_memory, checkpoint_memory, same_as_trl, torch_loop,
        )
    },
    "fine_tuning_rtx4090": functools.partial(fine_tuning, "RTX 4090"),
    "fine_tuning_h100": functools.partial(fine_tuning, "H100"),
    "fine_tuning_gh200": functools.partial(fine_tuning, "GH200"),
}  # fmt: skip
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)


def as_markdown(table: str) -> str:
    header, *rows = TABLES[table]()
    lines = [re.sub(" +", " ", f"| {' | '.join(cells)} |\n") for cells in (header, *rows)]
    return "".join([lines[0], "|" + "---|" * len(header) + "\n", *lines[1:]])


def update_tables(text: str) -> str:
    """Return the text of a page with its tables written anew."""
    return PLACE.sub(lambda place: f"{place[1]}\n{as_markdown(place[2])}\n{place[3]}", text)


def pages_with_tables() -> list[Path]:
    """Return the pages, which may have tables."""
    return sorted([*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")])


def main() -> None:
    for page in pages_with_tables():
        page.write_text(update_tables(page.read_text()))


if __name__ == "__main__":
    main()
