"""Every published number of README and docs equals the JSON that recorded it."""

import dataclasses
import json
import re

import jax
import pytest

from benchmarks import pages
from benchmarks.finetune import QWEN3_8B
from benchmarks.pages import by_name, faster, gigabytes, read
from effjax.memory.devices import MEASURED_FACTORS, expected_seconds, find_target
from tests.programs import needs_gpu_compiler

# Row names of the JSON files.
CONVOLUTIONS = "torchvision", "plain XLA", "effjax native"
FEATURES = 'effjax save="features"'
STRONGEST = "jax.checkpoint pass-through, recompute conv1"
ROOT = pages.DOCS.parent


def test_tables():
    """The pages have the tables of the JSON files: what `python -m benchmarks.pages` writes."""
    texts = [page.read_text() for page in pages.pages_with_tables()]
    for text in texts:
        assert pages.update_tables(text) == text
    assert sorted(re.findall(r"<!-- table (\w+) -->", "".join(texts))) == sorted(pages.TABLES)


def test_factors_of_measured_speeds():
    factors = read("planned/published.json")["factors"]
    assert {name: (least, most) for name, (_, least, most) in factors.items()} == MEASURED_FACTORS
    target = find_target("rtx4090")
    least, most = expected_seconds(target, 2.0) or (0, 0)
    assert [least / 2, most / 2] == factors["rtx4090"][1:]
    other = dataclasses.replace(target, config="", memory_bytes=1)  # a file may have any name
    assert expected_seconds(other, 2.0) is expected_seconds(find_target("b200"), 2.0) is None


def test_planned_memory_of_programs_that_others_ran():
    for row in read("planned/published_memory.json")["rows"]:
        tolerance = 0.07 if row["planned_host_bytes"] else 0.01
        assert row["ratio"] == pytest.approx(1, abs=tolerance)


def test_8_bit_products():
    """Check the goals of the speeds, and the sentences about losses."""
    rows = by_name("planned/fp8.json")
    for gpu, least in {"RTX 4090": 1.4, "H100": 1.35}.items():
        assert rows[f"Qwen3-8B, {gpu}, fp8"]["ratio"] > least
    losses = by_name("cpu/fp8_losses.json")
    seeds = range(len(losses) // 3)
    numbers = []
    for key in ("last_loss", "validation_loss"):
        wide, narrow = ([losses[f"{d}, seed {i}"][key] for i in seeds] for d in pages.FP8)
        differences = [b - a for a, b in zip(wide, narrow, strict=True)]
        numbers += [
            f"by {min(differences):.3f} to {max(differences):.3f}",
            f"{max(wide) - min(wide):.3f} between",
        ]
    assert not find_missing(numbers, "docs/matmul_fp8.md")


def find_missing(numbers, *pages):
    """Return the numbers that the text of some pages does not have."""
    text = " ".join("".join((ROOT / p).read_text() for p in pages).replace("**", "").split())
    return [number for number in numbers if number not in text]


def test_largest_model_at_equal_precision():
    """Check the arithmetic for 12 bytes per parameter, and that it explains the planned bytes."""
    record = read("planned/offload_largest_gh200.json")
    fewer, most = record["rows"][-2:]  # of equal layers
    layers = most["layers"] - fewer["layers"]
    parameters = (most["parameters"] - fewer["parameters"]) / layers
    inputs = record["batch_size"] * record["context"] * most["width"] * 2
    planned = (most["planned_host_bytes"] - fewer["planned_host_bytes"]) / layers
    assert planned == pytest.approx(6 * parameters + inputs, rel=1e-3)

    layers = int(most["host_bytes"] // (12 * parameters + inputs))
    others = most["parameters"] - most["layers"] * parameters
    numbers = [
        f"{most['planned_host_bytes'] / most['parameters']:.1f} bytes of host memory per parameter",
        f"{layers} layers, about {(layers * parameters + others) / 1e9:.0f} billion parameters",
    ]
    assert not find_missing(numbers, "docs/measured_offload.md")


def test_fine_tuning():
    """Check the numbers in the text about fine-tuning of language models."""
    rows = by_name("planned/finetune.json")

    def host(name):
        return gigabytes(rows[name], "planned_host")

    short, long = (
        100 * rows[f"Qwen3-8B, adamw, H100{size}"]["peak_share"]
        for size in ("", ", 1 × 131072 tokens")
    )
    batch = rows["Qwen3-8B, adamw, RTX 4090, 32 × 4096 tokens"]
    flops = rows["Qwen3-14B, adamw, GH200"]["peak_share"] * 989.4
    numbers = [
        f"Qwen3-8B at {32 * 4.096 / batch['step_seconds']:.1f}k tokens/s (32 × 4096), "
        f"{gigabytes(batch, 'planned_host')} GB of host memory",
        f"Qwen3-32B, {host('Qwen3-32B, adamw, RTX 4090')} GB |",
        f"Qwen3-32B, {host('Qwen3-32B, adamw8bit, RTX 4090')} GB; "
        f"Llama-3.3-70B, {host('Llama-3.3-70B, adamw8bit, RTX 4090')} GB",
        f"reaches {short:.0f} % of an H100's peak at 4096 tokens, and {long:.0f} % at 131072",
        f"modelled at {flops:.0f} TFLOP/s",
    ]
    assert not find_missing(numbers, "docs/measured_offload.md")


def test_readme():
    convolution = "cpu/deform_conv_8x56x56x64_1_forward_backward.json"
    conv = by_name(convolution)
    flax = by_name("cpu/batch_norm_float32.json")["Flax BatchNorm"]
    picture = by_name("planned/memory_block_48_h200.json")
    numbers = [
        f"Flax {flax['kept']} ×",
        *(f"{1e3 * conv[n]['seconds']:.0f} ms" for n in CONVOLUTIONS),
        faster(conv["effjax native"]),
        f"plain {gigabytes(picture['plain autodiff'], 'peak')} GB",
        f"layer {gigabytes(picture['jax.checkpoint a layer'], 'peak')} GB",
        f"strongest jax.checkpoint {gigabytes(picture[STRONGEST], 'peak', 2)} GB",
        f"features {gigabytes(picture[FEATURES], 'peak', 2)} GB",
    ]  # fmt: skip
    tuning = by_name("planned/finetune.json")["Qwen3-8B, adamw, RTX 4090"]
    small = by_name("planned/finetune.json")["Qwen3-8B, adamw8bit, RTX 4090"]
    numbers += [
        f"{gigabytes(tuning, 'state')} GB for parameters and moments alone",
        *(f"{gigabytes(tuning, f'planned_{where}')} GB" for where in ("device", "host")),
        f"{tuning['step_seconds']:.1f} s a step, modelled",
        f"`--optimizer adamw8bit` ({gigabytes(small, 'planned_host')} GB)",
    ]
    assert not find_missing(numbers, "README.md")


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_the_command_of_the_readme_prints_its_row(tmp_path, monkeypatch, capsys):
    """The plan of the command is that of the JSON file; other versions of XLA plan others."""
    pytest.importorskip("typer")
    from effjax import cli

    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text(json.dumps(QWEN3_8B.to_json()))
    monkeypatch.chdir(tmp_path)
    command = re.search(r"`effjax (memory finetune qwen[^`]*)`", (ROOT / "README.md").read_text())
    record = read("planned/finetune.json")
    row = next(r for r in record["rows"] if r["name"] == "Qwen3-8B, adamw, RTX 4090")
    assert cli.main([*command[1].split(), "--only", row["form"], "--json"]) == 0
    form = json.loads(capsys.readouterr().out)["forms"][row["form"]]
    assert form["host_bytes"] == pytest.approx(row["planned_host_bytes"], rel=0.01)
    planned = [form["device_bytes"], form["step_seconds"]]
    published = [row["planned_device_bytes"], row["step_seconds"]]
    same_version = record["versions"]["jax"] == jax.__version__
    assert planned == pytest.approx(published, rel=0.01 if same_version else 0.3)
