"""Every published number of README and docs equals the JSON that recorded it."""

import itertools
import json
import math
import pathlib
import re

import pytest

from benchmarks.measure import fit_exponent

ROOT = pathlib.Path(__file__).parent.parent.parent
MEASURED = ROOT / "docs" / "measured"
# Row names of the JSON files.
CONVOLUTIONS = "torchvision", "plain XLA", "effjax native"
IN_MEMORY = "in memory", "in memory, remat"
DTYPES = "float32", "bfloat16"
CONV, FEATURES = 'effjax save="conv"', 'effjax save="features"'
STRONGEST = "jax.checkpoint pass-through, recompute conv1"
# Columns of language models, in bytes.
LANGUAGE_MODEL = "planned_device", "planned_host", "to_device", "to_host"


def table_rows(page):
    """Return the rows of a page's tables as lists of cells without emphasis.

    Pages say "per layer" where the names in the JSON files say "a layer".
    """
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    lines = [re.sub(r"\*\*|`", "", line).replace(" per ", " a ") for line in lines]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def read(file):
    return json.loads((MEASURED / file).read_text())


def measured(file):
    """Return the rows of a JSON file by name; the deepest model wins."""
    return {row["name"]: row for row in read(file)["rows"]}


def grouped(file, key="name"):
    """Return lists of the rows of a JSON file that agree in a column."""
    groups = {}
    for row in read(file)["rows"]:
        groups.setdefault(row[key], []).append(row)
    return groups


def megabytes(row, key):
    return f"{row[f'{key}_bytes'] / 1e6:.0f}"


def gigabytes(row, key, digits=1):
    return f"{row[f'{key}_bytes'] / 1e9:.{digits}f}"


def find_missing(numbers, page):
    """Return the numbers that the text of a page does not have."""
    text = " ".join((ROOT / page).read_text().replace("**", "").split())
    return [number for number in numbers if number not in text]


def block_rows():
    """Yield the rows of both dense-block tables: peak by depth; temporaries and CPU time."""
    files = MEASURED.glob("planned/memory_block_*_h200.json")
    by_depth = sorted((int(path.stem.split("_")[2]), measured(path)) for path in files)
    planned = by_depth[-1][1]
    fast, slow = (measured(f"cpu/dense_block_{n}_float32.json") for n in (24, 48))
    for name in planned:
        peaks = [rows[name]["peak_bytes"] for _, rows in by_depth]
        power = fit_exponent([depth for depth, _ in by_depth], peaks)
        yield [name, *(megabytes(rows[name], "peak") for _, rows in by_depth), f"{power:.2f}"]
        ratios = [f"{rows[name]['ratio']:.2f}×" for rows in (fast, slow)]
        yield [name, megabytes(planned[name], "temp"), *ratios, megabytes(slow[name], "temp")]
    for name in fast.keys() - planned.keys():
        yield [name, "", *(f"{rows[name]['ratio']:.2f}×" for rows in (fast, slow)), ""]


def kept_rows():
    for name, rows in grouped("growth/depth_kept.json").items():
        kept = (megabytes(row, "kept") for row in rows)
        yield [name, *kept, f"{rows[-1]['exponent']:.2f}"]


def batch_norm_rows():
    half, single = (measured(f"cpu/batch_norm_{dtype}.json") for dtype in ("bfloat16", "float32"))
    for name in single:
        both = single[name], half[name]
        yield [name, *(f"{row['ratio']:.2f}×" for row in both), *(f"{row['kept']}" for row in both)]


def batch_norm_layers_rows():
    rows = measured("planned/batch_norm_layers_float32_h200.json")
    for form, shown in {
        "one after the other": "one after the other, in one jit",
        "in lax.scan": "in lax.scan",
        "in jax.checkpoint": "in jax.checkpoint",
        "in jax.checkpoint, all saved": "in jax.checkpoint, with everything_saveable",
    }.items():
        both = [rows[f"{name}, {form}"] for name in ("Flax BatchNorm", "effjax.sync_batch_norm")]
        peaks = (megabytes(row, "peak") for row in both)
        yield [shown, *peaks, *(f"{row['kept']:.0f}" for row in both)]


def densenet_rows():
    names = ["plain, Flax's BatchNorm", "jax.checkpoint a layer"]
    names += ['effjax save="conv"', FEATURES]
    rows = measured("planned/memory_densenet_100_h200.json").values()
    for name, row in zip(names, rows, strict=True):
        yield [name, megabytes(row, "peak")]


def faster_than_torchvision(file):
    """Return the quartiles, over the rounds, of torchvision's time relative to native code's."""
    low, high = measured(file)["effjax native"]["ratio_quartiles"]
    low, high = f"{1 / high:.0f}", f"{1 / low:.0f}"
    return f"{low}×" if low == high else f"{low}–{high}×"


def deform_conv_rows():
    for shape in ("2x56x56x64", "2x25x42x256", "2x50x84x128", "8x56x56x64"):
        for groups in (1, 4) if shape == "2x50x84x128" else (1,):
            file = f"cpu/deform_conv_{shape}_{groups}_forward"
            passes = measured(f"{file}.json"), measured(f"{file}_backward.json")
            faster = (faster_than_torchvision(f"{file}{more}.json") for more in ("", "_backward"))
            yield [
                shape.replace("x", " × ") if groups == 1 else "the same, 4 offset groups",
                *(
                    " / ".join(f"{1e3 * rows[name]['seconds']:.0f}" for rows in passes)
                    for name in ("torchvision", "plain XLA", "effjax xla", "effjax native")
                ),
                " / ".join(f"{1e3 * r['matrix products alone']['seconds']:.0f}" for r in passes),
                " / ".join(faster),
            ]


def sass_rows():
    for name, row in measured("planned/cuda_sass.json").items():
        kernel, dtype, architecture = name.split(", ")
        if dtype != "float16" and architecture == "sm_90":
            counts = (str(row[key]) for key in ("budget", "loads_in_flight", "registers"))
            yield [f"{kernel}, {dtype}", f"{row['per_pack']:.0f}", *counts]


def deform_attention_rows():
    files = [f"deform_attention_{queries}" for queries in (300, 22223)]
    runs = [measured(f"cpu/{f}_forward{more}.json") for f in files for more in ("", "_backward")]
    planned = [measured(f"planned/{file}_h200.json") for file in files]
    for name in ("packed gather", "effjax xla", "effjax native"):
        milliseconds = [f"{1e3 * run[name]['seconds']:.0f}" for run in runs]
        times = " / ".join(milliseconds[:2]), " / ".join(milliseconds[2:])
        yield [name, *times, *(megabytes(plan[name], "temp") for plan in planned)]


def roi_rows():
    for ratio, threads in itertools.product((2, 0), (2, 1)):
        file = f"cpu/roi_align_{ratio}_{threads}_forward"
        passes = measured(f"{file}.json"), measured(f"{file}_backward.json")
        yield [
            {2: "2", 0: "one a pixel"}[ratio],
            str(threads),
            *(
                " / ".join(f"{1e3 * r[name]['seconds']:.0f}" for r in passes if name in r)
                for name in ("torchvision", "effjax xla", "effjax native")
            ),
            " / ".join(f"{1 / rows['effjax native']['ratio']:.1f}×" for rows in passes),
        ]


def offload_rows():
    for name, rows in grouped("planned/offload_adam_1024_float32_h200.json").items():
        device = [gigabytes(row, "planned_device", 2) for row in rows]
        name = "jax.checkpoint a layer" if name == "in memory, remat" else name
        yield [name, *device, gigabytes(rows[-1], "planned_host", 2)]


def cross_entropy_rows():
    for name, rows in grouped("planned/cross_entropy_32768_h200.json").items():
        rows = sorted(rows, key=lambda row: row["of"])
        yield [name, *(megabytes(row, "peak") for row in rows)]


def fused_update_rows():
    names = {"in memory, remat": "jax.checkpoint a layer, then optax"}
    names["in memory, fused update"] = "updated in the backward pass"
    for name, shown in names.items():
        files = (f"planned/offload_{tx}_1024_float32_h200.json" for tx in ("adam", "sgd"))
        rows = [row for file in files for row in grouped(file)[name] if row["layers"] in (8, 32)]
        yield [shown, *(gigabytes(row, "planned_device", 2) for row in rows)]


def peer_rows():
    for name, row in measured("planned/offload_peers_h200.json").items():
        device, host = (gigabytes(row, f"planned_{where}") for where in ("device", "host"))
        yield [name, device, f"{row['ratio']:.3f}", host]


def gh200_rows():
    """Yield rows of device and host memory by depth, and of the largest models."""
    for name, rows in grouped("planned/offload_bracket_gh200.json").items():
        places = itertools.product(("planned_device", "planned_host"), rows)
        yield [name, *(gigabytes(row, place) for place, row in places)]
    sizes = [f"{row['parameters'] / 1e9:.2f} B" for row in rows]
    yield ["", *sizes, *(f"host, {size}" for size in sizes)]
    for row in read("planned/offload_largest_gh200.json")["rows"]:
        size = f"{row['layers']} of width {row['width']}", f"{row['parameters'] / 1e9:.1f}"
        planned = (gigabytes(row, f"planned_{where}") for where in ("host", "device"))
        yield [gigabytes(row, "host", 0), *size, *planned]


def language_model_rows():
    for name, row in measured("planned/language_model_h100.json").items():
        yield [name, *(gigabytes(row, key) for key in LANGUAGE_MODEL)]


def fine_tuning_rows():
    """Yield (GPU, row of its table); a cell has the numbers of float32 and of 8-bit moments.

    † marks more memory than there is.
    """
    for gpu, model in itertools.product(
        ("RTX 4090", "H100", "GH200"),
        ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.3-70B"),
    ):
        name = model.lower().replace("-", "_").replace(".", "_")
        cells = {}
        for row in read(f"planned/language_model_table_{name}.json")["rows"]:
            if row["gpu"] == gpu and row["chosen"]:
                cells.setdefault(row["tokens"], {})[row["moments"]] = row
        for tokens, by_moments in cells.items():
            columns = zip(*map(fine_tuning_cells, by_moments.values()), strict=True)
            yield gpu, [model, f"{tokens}", *(" / ".join(dict.fromkeys(c)) for c in columns)]


def fine_tuning_cells(row):
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


def three_digits(number):
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def fine_tuning_tables():
    for _, row in fine_tuning_rows():
        yield row


def host_bytes_rows():
    for name, row in measured("planned/language_model_h100.json").items():
        if name.endswith("others on the host"):
            host, *traffic = (gigabytes(row, key) for key in LANGUAGE_MODEL[1:])
            per_parameter = f"{row['planned_host_bytes'] / row['parameters']:.2f}"
            yield [name.split(",")[0], host, per_parameter, *traffic]


def resnet_rows():
    for name, row in measured("planned/resnet50_256_h200.json").items():
        yield [name, gigabytes(row, "peak", 2), f"{row['ratio']:.2f}"]


def optimizer_rows():
    for name, row in measured("cpu/optimizers.json").items():
        assert len(row["losses"]) == 3
        low, high = row["loss_quartiles"]
        yield [name, f"{row['loss']:.3f}", f"{low:.3f}–{high:.3f}"]


def optimizer_matrix_rows():
    for name, row in measured("planned/optimizers_matrix_h100.json").items():
        sizes = (gigabytes(row, key, 2) for key in ("peak", "temp"))
        yield [name, *sizes, f"{row['temp_bytes_per_parameter']:.2f}"]


def fit_rows():
    for file in sorted(MEASURED.glob("planned/fit_*_h200.json")):
        network = file.stem.removeprefix("fit_").rpartition("_")[0].split("_")[0]
        for row in read(file)["rows"]:
            options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
            size = f"{gigabytes(row, 'planned_device', 2)} GB"
            cost = size, f"{1e3 * row['step_seconds']:.1f} ms", f"{row['ratio']:.2f}"
            yield [network, row["name"], options, *cost, str(row["compiled"])]


def tpu_memory_rows():
    by_program = {}
    for name in ("tpu_memory", "tpu_offload", "tpu_sampling"):
        for program, rows in grouped(f"planned/{name}_v5e.json", "of").items():
            by_program[program] = {row["name"]: row for row in rows}
    for program, rows in by_program.items():
        cells = []
        for name in ("plain JAX", "jax.checkpoint", "effjax"):
            if not (row := rows.get(name)):
                cells.append("")
            elif not row["fits"]:
                cells.append("refused")
            else:
                cells.append(f"{megabytes(row, 'peak')} ({megabytes(row, 'temp')})")
        yield [program, *cells, megabytes(rows["effjax"], "planned_host")]


def tpu_traffic_rows():
    for name, rows in grouped("planned/tpu_traffic_v5e.json").items():
        operators = itertools.groupby(rows, lambda row: row["of"])
        yield [
            name,
            *(" / ".join(megabytes(r, "traffic") for r in group) for _, group in operators),
        ]


def tpu_all_reduce_rows():
    for name, rows in grouped("planned/tpu_sync_batch_norm_v5e.json").items():
        yield [name, *(str(row["all_reduces"]) for row in rows)]


def overlap_rows():
    for name, row in measured("planned/offload_overlap.json").items():
        seconds = (f"{1e3 * row[key]:.1f}" for key in ("best_seconds", "step_seconds"))
        yield [name.removeprefix("effjax, "), *seconds, f"{row['ratio']:.2f}"]


TABLES = {
    "measured_dense_block": [block_rows, kept_rows, densenet_rows],
    "measured_sampling": [deform_conv_rows, deform_attention_rows, roi_rows, sass_rows],
    "measured_offload": [
        offload_rows,
        fused_update_rows,
        peer_rows,
        gh200_rows,
        language_model_rows,
        fine_tuning_tables,
    ],
    "offload_how_it_works": [overlap_rows],
    "measured_layers": [batch_norm_rows, cross_entropy_rows],
    "measured_tpu": [tpu_memory_rows, tpu_traffic_rows, tpu_all_reduce_rows],
    "batch_norm": [batch_norm_layers_rows],
    "resnet": [resnet_rows],
    "planner": [fit_rows],
    "optimizers": [optimizer_rows, optimizer_matrix_rows, host_bytes_rows],
}


@pytest.mark.parametrize(
    ("page", "rows_of"), [(page, rows_of) for page, tables in TABLES.items() for rows_of in tables]
)
def test_tables(page, rows_of):
    shown = table_rows(ROOT / "docs" / f"{page}.md")
    rows = list(rows_of())
    assert rows and not [row for row in rows if row not in shown]


def test_largest_model_at_equal_precision():
    """Check the arithmetic for 12 bytes per parameter, and that it explains the planned bytes."""
    record = read("planned/offload_largest_gh200.json")
    fewer, most = record["rows"][-2:]  # of equal layers
    layers = most["layers"] - fewer["layers"]
    parameters = (most["parameters"] - fewer["parameters"]) / layers
    inputs = record["batch_size"] * record["context"] * most["width"] * 2
    planned = (most["planned_host_bytes"] - fewer["planned_host_bytes"]) / layers
    assert planned == pytest.approx(6 * parameters + inputs, rel=1e-3)

    layer_bytes = 12 * parameters + inputs
    layers = int(most["host_bytes"] // layer_bytes)
    others = most["parameters"] - most["layers"] * parameters
    numbers = [
        f"{most['planned_host_bytes'] / most['parameters']:.1f} bytes of host memory per parameter",
        f"{parameters / 1e6:.1f} million parameters",
        f"= {layer_bytes / 1e9:.2f} \\;\\text{{GB}}",
        f"{layers} layers fit: {layers * parameters / 1e9:.1f} billion parameters",
        f"{others / 1e9:.1f} billion of the embedding",
        f"{(layers * parameters + others) / 1e9:.0f} billion",
    ]
    assert not find_missing(numbers, "docs/measured_offload.md")


def test_fine_tuning():
    """Check the numbers in the text about fine-tuning of language models."""
    rows = {}
    for model in ("qwen3_8b", "qwen3_14b", "qwen3_32b", "llama_3_3_70b"):
        for row in read(f"planned/language_model_table_{model}.json")["rows"]:
            rows[model, row["gpu"], row["tokens"], row["moments"], row["memory"]] = row

    def find(model, gpu, moments, tokens=4096):
        return rows[model, gpu, tokens, moments, "host"]

    def find_host(*args):
        return gigabytes(find(*args), "planned_host")

    small = [
        find("qwen3_8b", gpu, "float32", n) for gpu in ("RTX 4090", "H100") for n in (4096, 32768)
    ]
    link = [find("qwen3_32b", gpu, "float32") for gpu in ("GH200", "H100")]
    shares = [find("qwen3_8b", "H100", "float32", n)["peak_share"] for n in (4096, 131072)]
    flops = find("qwen3_14b", "GH200", "float32")["peak_share"] * 989.4
    numbers = [
        "{} and {} GB, those of the H100 {} and {} GB".format(
            *(gigabytes(row, "planned_device") for row in small)
        ),
        f"needs {find_host('qwen3_32b', 'RTX 4090', '8-bit', 32768)} GB of host",
        "takes {:.2f} s there and {:.2f} s on an H100".format(*(r["step_seconds"] for r in link)),
        f"Qwen3-32B on a GH200, {find_host('qwen3_32b', 'GH200', 'float32')} GB of host memory",
        f"70B on a GH200, {find_host('llama_3_3_70b', 'GH200', '8-bit')} GB of host",
        "reaches {:.0f} % of an H100's peak at 4096 tokens, and {:.0f} % at 131072".format(
            *(100 * s for s in shares)
        ),
        f"modelled at {flops:.0f} TFLOP/s",
        f"1.5 TB would hold {1.5e12 / 10 / 1e9:.0f} billion",
        f"at 12 bytes {1.5e12 / 12 / 1e9:.0f} billion",
        f"480 GB would hold {480e9 / 12 / 1e9:.0f} billion",
    ]
    assert not find_missing(numbers, "docs/measured_offload.md")
    fits = [r for r in rows.values() if r["gpu"] == "RTX 4090" and r["moments"] == "float32"]
    assert all(r["fits_device"] and r["fits_host"] for r in fits if r["parameters"] < 15e9)
    fits = [find("qwen3_32b", "GH200", "float32", n) for n in (4096, 32768, 131072)]
    fits += [find("llama_3_3_70b", "GH200", "8-bit", n) for n in (4096, 32768, 131072)]
    assert all(r["fits_device"] and r["fits_host"] for r in fits)


def test_pixels_of_attention():
    pixels = read("planned/tpu_traffic_v5e.json")["pixels"]["ms_deform_attn"]
    assert not find_missing([f"{pixels / 1e6:.1f} million pixels"], "docs/measured_tpu.md")


def test_low_precision_optimizers_train_as_well_as_float32():
    """8 bits and stochastic rounding reach the loss of float32 Adam; plain bfloat16 does not."""
    loss = {name: row["loss"] for name, row in measured("cpu/optimizers.json").items()}
    reference = loss["plain float32 Adam"]
    ours = "8-bit moments", "bfloat16, stochastic rounding"
    for name in (*ours, "bfloat16, 8-bit moments, stochastic rounding"):
        assert loss[f"effjax {name}"] < 1.01 * reference, name
    assert loss["plain bfloat16 Adam"] > 1.02 * reference


def test_readme():
    block = measured("cpu/dense_block_24_float32.json")
    convolution = "cpu/deform_conv_8x56x56x64_1_forward_backward.json"
    conv = measured(convolution)
    model = measured("planned/offload_adam_1024_float32_h200.json")
    fused = model["all offloaded, fused update"]
    flax = [measured(f"cpu/batch_norm_{dtype}.json")["Flax BatchNorm"] for dtype in DTYPES]
    picture = measured("planned/memory_block_48_h200.json")
    counts = read("growth/depth_kept.json")["rows"]
    kept = {row["name"]: row for row in counts if row["layers"] == 48}
    numbers = [
        *(f"{row['kept']} ×" for row in flax),
        f"plain {block['plain autodiff']['seconds']:.2f} s",
        f"`jax.checkpoint` {block[STRONGEST]['seconds']:.2f} s",
        f"PyTorch {block['PyTorch']['seconds']:.2f} s",
        f"{block[CONV]['seconds']:.2f} s",
        *(f"{1e3 * conv[n]['seconds']:.0f} ms" for n in CONVOLUTIONS),
        faster_than_torchvision(convolution),
        *(f"{gigabytes(model[n], 'planned_device', 2)} GB" for n in IN_MEMORY),
        *(f"{gigabytes(fused, f'planned_{where}', 2)} GB" for where in ("device", "host")),
        f"plain {gigabytes(picture['plain autodiff'], 'peak')} GB",
        f"layer {gigabytes(picture['jax.checkpoint a layer'], 'peak')} GB",
        f"strongest jax.checkpoint {gigabytes(picture[STRONGEST], 'peak', 2)} GB",
        f"features {gigabytes(picture[FEATURES], 'peak', 2)} GB",
        f"({megabytes(kept[STRONGEST], 'kept')} and {megabytes(kept[FEATURES], 'kept')} MB)",
    ]  # fmt: skip
    tuning = measured("planned/language_model_table_qwen3_8b.json")
    tuning = tuning["float32 moments, state on the host, 4096 tokens, RTX 4090"]
    numbers += [
        f"{10 * tuning['parameters'] / 1e9:.1f} GB for parameters and moments alone",
        f"{12 * tuning['parameters'] / 1e9:.1f} GB of host memory",
        *(f"{gigabytes(tuning, f'planned_{where}')} GB" for where in ("device", "host")),
        f"{tuning['step_seconds']:.1f} s a step, modelled",
    ]
    assert not find_missing(numbers, "README.md")
