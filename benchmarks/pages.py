"""Tables of the documentation, written from the JSON files of `docs/measured`.

`python -m benchmarks.pages` rewrites them in the pages of `docs`, between `<!-- table NAME -->` and
`<!-- end -->`.
"""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .results import Column, Row, as_markdown, make_table

DOCS = Path(__file__).parent.parent / "docs"
MEASURED = DOCS / "measured"


def read(file: str) -> Row:
    """Return the content of a JSON file in `docs/measured`."""
    return json.loads((MEASURED / file).read_text())


def by_name(file: str) -> dict[str, Row]:
    """Return the rows of a file by name; the deepest model wins."""
    return {row["name"]: row for row in read(file)["rows"]}


class Table(NamedTuple):
    """The columns of a table of a page, and the files with its rows.

    by:    keys of rows that are one line, as in `make_table`.
    keep:  whether a row is in the table.
    """

    files: list[str]
    columns: list[Column]
    by: tuple[str, ...] = ()
    keep: Callable[[Row], bool] = lambda row: True

    def as_markdown(self) -> str:
        """Return the table; the settings of a file are values of each of its rows."""
        rows = ({**record, **row} for record in map(read, self.files) for row in record["rows"])
        return as_markdown(make_table(filter(self.keep, rows), self.columns, self.by))


def gigabytes(row: Row, key: str, digits: int = 1) -> str:
    return f"{row[f'{key}_bytes'] / 1e9:.{digits}f}"


def gb(header: str, key: str, digits: int = 1, **only: Any) -> Column:
    return Column(header, f"{key}_bytes", f"{{:.{digits}f}}", 1e9, only)


def mb(header: str, key: str, **only: Any) -> Column:
    return Column(header, f"{key}_bytes", "{:.0f}", 1e6, only)


def number(header: str, key: str, digits: int = 0, **only: Any) -> Column:
    return Column(header, key, f"{{:.{digits}f}}", only=only)


def words(header: str, template: str) -> Column:
    """Return a column with values of a row, such as ``"{layers} layers"``."""
    return Column(header, lambda row: template.format(**row))


def show_name(row: Row) -> str:
    """Return the name of a program in Markdown, with code, and in bold if it is effjax's."""
    name = row["name"].replace("checkpoint a ", "checkpoint per ")
    name = re.sub(r'jax\.(checkpoint|lax\.\w+)|\w+=("\w+"|\w+)', r"`\g<0>`", name)
    ours = row["name"] in row.get("ours", ())
    return f"**{name}**" if ours else re.sub(r"^effjax[\w.]*", r"**\g<0>**", name)


def faster(row: Row) -> str:
    """Return the quartiles, over the rounds, of the reference's time relative to the row's."""
    low, high = (f"{1 / ratio:.0f}" for ratio in reversed(row["ratio_quartiles"]))
    return f"{low}×" if low == high else f"{low}–{high}×"


def three_digits(number: float) -> str:
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}"


def with_dagger(row: Row) -> str:
    """Return the device memory, with † if it is more than there is."""
    return gigabytes(row, "planned_device") + "†" * (not row["fits"])


def show_peak(row: Row) -> str:
    """Return the peak and the temporary memory of a program for a TPU."""
    if not row["fits"]:
        return "refused"
    return f"{row['peak_bytes'] / 1e6:.0f} ({row['temp_bytes'] / 1e6:.0f})"


def in_unit(header: str, key: str) -> Column:
    def show(row: Row) -> str:
        return (
            f"{row[key] / row['unit_bytes']:.2f} {({2**20: 'MiB'}).get(row['unit_bytes'], 'GiB')}"
        )

    return Column(header, show)


NAME, MODEL = Column("", show_name), Column("model", "model")
NATIVE = {"name": "effjax native"}
PROGRAMS = {
    "torchvision": "torchvision", "plain XLA": ("plain XLA", "packed gather"),
    'effjax, `"xla"`': "effjax xla", "**effjax, native**": "effjax native",
}  # fmt: skip
DEVICES = {"h100": "H100", "rtx4090": "RTX 4090"}
QUERIES, DTYPES, PASSES = (300, 22223), ("float32", "bfloat16"), ("forward", "forward_backward")
FP8, FORMS = ("bfloat16", "fp8"), ("float32", "bfloat16", "fp8")


def times(unit: float, key: str = "seconds") -> list[Column]:
    """Return a column for each program that samples."""
    return [Column(title, key, "{:.0f}", unit, {"name": n}) for title, n in PROGRAMS.items()]


def each(dtypes: Any, header: str, key: str, form: str, unit: float = 1) -> list[Column]:
    """Return a column for each dtype."""
    return [Column(header.format(d), key, form, unit, {"dtype": d}) for d in dtypes]


def files(template: str, *values: Any) -> list[str]:
    """Return the files of all combinations of some values."""
    return [template.format(*each) for each in itertools.product(*values)]


def fine_tuning(length: int, batch_size: int) -> Table:
    """Return the table of `effjax finetune` by model and GPU."""
    columns = [MODEL, Column("GPU", "gpu")]
    for optimizer, name in {"adamw": "AdamW", "adamw8bit": "8-bit"}.items():
        only: Row = {"optimizer": optimizer}
        columns += [
            gb(f"host, {name}", "planned_host", **only),
            Column("device", with_dagger, only=only),
            Column("s a step", lambda row: three_digits(row["step_seconds"]), only=only),
            Column("of peak", "peak_share", "{:.0%}", only=only),
        ]
    return Table(
        ["planned/finetune.json"],
        columns,
        ("gpu", "model"),
        lambda row: (row["length"], row["batch_size"]) == (length, batch_size),
    )


TABLES = {
    "peak_by_depth": Table(
        files("planned/memory_block_{}_h200.json", (12, 24, 48)),
        [NAME, *(mb(f"{n}", "peak", layers=n) for n in (12, 24, 48))],
        ("name",),
    ),
    "dense_block": Table(
        files("cpu/dense_block_{}_float32.json", (24, 48)),
        [
            NAME,
            *(Column(f"{n} layers", "ratio", "{:.2f}×", only={"layers": n}) for n in (24, 48)),
            mb("48 layers [MB]", "temp", layers=48),
        ],
        ("name",),
    ),
    "densenet": Table(["planned/memory_densenet_100_h200.json"], [NAME, mb("peak [MB]", "peak")]),
    "resnet": Table(
        ["planned/resnet50_256_h200.json"],
        [NAME, gb("peak [GB]", "peak", 2), number("relative to Flax", "ratio", 2)],
    ),
    "batch_norm": Table(
        files("cpu/batch_norm_{}.json", DTYPES),
        [
            NAME,
            *(Column(d, "ratio", "{:.2f}×", only={"dtype": d}) for d in DTYPES),
            *(Column(f"kept, {d}", "kept", "{:g}", only={"dtype": d}) for d in DTYPES),
        ],
        ("name",),
    ),
    "cross_entropy": Table(
        ["planned/cross_entropy_32768_h200.json"],
        [
            NAME,
            *(mb(f"head, {n}", "peak", of="head", batch_size=n) for n in (16, 64)),
            *(mb(f"model, {n}", "peak", of="model", batch_size=n) for n in (16, 64)),
        ],
        ("name",),
    ),
    "deform_conv": Table(
        files(
            "cpu/deform_conv_{}_{}.json",
            ("2x56x56x64_1", "2x25x42x256_1", "2x50x84x128_1", "2x50x84x128_4", "8x56x56x64_1"),
            PASSES,
        ),
        [
            words("batch × height × width × channels", "{batch} × {height} × {width} × {channels}"),
            number("offset groups", "offset_groups"),
            *times(1e-3),
            Column("**torchvision / native**", faster, only=NATIVE),
        ],
        ("batch", "height", "width", "channels", "offset_groups"),
    ),
    "deform_attention": Table(
        [
            *files("cpu/deform_attention_{}_{}.json", QUERIES, PASSES),
            *files("planned/deform_attention_{}_h200.json", QUERIES),
        ],
        [
            NAME,
            *(Column(f"{n} queries", "seconds", "{:.0f}", 1e-3, {"queries": n}) for n in QUERIES),
            *(mb(f"{n} queries [MB]", "temp", queries=n, target="h200") for n in QUERIES),
        ],
        ("name",),
    ),
    "roi": Table(
        files("cpu/roi_align_{}_{}_{}.json", (2, 0), (2, 1), PASSES),
        [
            Column(
                "samples of a bin", lambda row: "2 × 2" if row["sampling_ratio"] else "its pixels"
            ),
            number("cores", "threads"),
            *times(1e-3),
            Column("torchvision / native", lambda row: f"{1 / row['ratio']:.1f}×", only=NATIVE),
        ],
        ("sampling_ratio", "threads"),
    ),
    "gpu_sampling": Table(
        ["planned/gpu_sampling_h100.json"],
        [
            Column("", lambda row: row["of"].replace("x", " × ")),
            *times(1e-6, "step_seconds"),
            Column('`"xla"` / native', lambda row: f"{1 / row['ratio']:.1f}×", only=NATIVE),
        ],
        ("of",),
    ),
    "expert_mlp": Table(
        ["planned/expert_mlp.json"],
        [
            number("tokens", "tokens"),
            Column("device", lambda row: DEVICES[row["target"]]),
            NAME,
            Column("time [ms]", lambda row: three_digits(row["step_seconds"] * 1e3)),
            Column("products [ms]", lambda row: three_digits(row["product_seconds"] * 1e3)),
            number("ratio", "ratio", 1),
            gb("temporaries [GB]", "temp", 2),
            gb("moved [GB]", "traffic", 0),
        ],
    ),
    "detector": Table(
        ["planned/detector.json"],
        [
            Column("", lambda row: show_name(row | {"name": row["form"]})),
            *(
                column
                for d in ("RTX 4090", "TPU v5e")
                for column in (
                    Column(f"{d} [GB]", with_dagger, only={"device": d}),
                    number("images/s", "images_per_second", device=d),
                    number("largest batch", "largest_batch", device=d),
                )
            ),
        ],
        ("form",),
    ),
    "offload_by_depth": Table(
        ["planned/offload_depths_h200.json"],
        [
            NAME,
            *(gb(f"{n}", "planned_device", 2, layers=n) for n in (4, 8, 16, 32)),
            gb("host, 32", "planned_host", 2, layers=32),
        ],
        ("name",),
    ),
    "offload_peers": Table(
        ["planned/offload_peers_h200.json"],
        [
            NAME,
            gb("device", "planned_device"),
            number("relative to the first row", "ratio", 3),
            gb("host", "planned_host"),
        ],
    ),
    "offload_gh200": Table(
        ["planned/offload_bracket_gh200.json"],
        [
            NAME,
            *(gb(f"{n} layers", "planned_device", layers=n) for n in (44, 47)),
            *(gb(f"host, {n} layers", "planned_host", layers=n) for n in (44, 47)),
        ],
        ("name",),
    ),
    "offload_largest": Table(
        ["planned/offload_largest_gh200.json"],
        [
            gb("host [GB]", "host", 0),
            words("layers", "{layers} of width {width}"),
            Column("billion parameters", "parameters", "{:.1f}", 1e9),
            gb("host, planned", "planned_host"),
            gb("device, planned", "planned_device"),
        ],
    ),
    "my_gpu": fine_tuning(4096, 1),
    "my_gpu_batches": fine_tuning(4096, 32),
    "my_gpu_long": fine_tuning(131072, 1),
    "my_quantized_gpu": Table(
        ["planned/finetune_quantized.json"],
        [
            MODEL,
            Column("weights", "weights"),
            gb("host", "planned_host"),
            gb("device", "planned_device"),
            Column("s a step", lambda row: three_digits(row["step_seconds"])),
            number("tokens/s", "tokens_per_second"),
            words("options", "`{options}`"),
        ],
    ),
    "optimizer_memory": Table(
        ["planned/optimizers_matrix_h100.json"],
        [
            NAME,
            gb("peak [GB]", "peak", 2),
            gb("temporaries [GB]", "temp", 2),
            number("temporaries per parameter", "temp_bytes_per_parameter", 2),
        ],
    ),
    "same_as_trl": Table(
        ["cpu/trl.json"],
        [
            Column("", "name"),
            Column("TRL, first step", lambda row: f"{row['trl_losses'][0]:.4f}"),
            Column("TRL, tenth", lambda row: f"{row['trl_losses'][-1]:.4f}"),
            Column("effjax, tenth", lambda row: f"{row['losses'][-1]:.4f}"),
            Column("largest difference", "difference", "{:.0e}"),
        ],
    ),
    "published": Table(
        ["planned/published.json"],
        [
            MODEL,
            Column("device", "target"),
            number("sequences", "batch_size"),
            number("measured [tokens/s]", "measured_tokens_per_second"),
            number("modelled [tokens/s]", "tokens_per_second"),
            Column("share of the peak", lambda row: f"{1 / row['ratio']:.0%}"),
            number("factor", "ratio", 2),
        ],
    ),
    "published_memory": Table(
        ["planned/published_memory.json"],
        [
            Column("program", "name"),
            in_unit("temporaries, printed", "printed_temporary_bytes"),
            in_unit("planned", "planned_temporary_bytes"),
            in_unit("in all, printed", "printed_bytes"),
            in_unit("planned", "planned_device_bytes"),
            number("ratio", "ratio", 2),
        ],
    ),
    "fp8": Table(
        ["planned/fp8.json"],
        [
            Column("GPU", "gpu"),
            *each(FP8, "{}", "tokens_per_second", "{:.0f}"),
            Column("faster", "ratio", "{:.2f}×", only={"dtype": "fp8"}),
            *(Column(f"LLMQ, {d}", lambda row, d=d: str(row["llmq"][row["gpu"]][d])) for d in FP8),
        ],
        ("gpu",),
        lambda row: row["of"] == "Qwen3-8B",
    ),
    "fp8_layer": Table(
        ["planned/fp8.json"],
        [
            Column("GPU", "gpu"),
            Column("", "of"),
            *each(FP8, "{} [ms]", "step_seconds", "{:.2f}", 1e-3),
        ],
        ("gpu", "of"),
        lambda row: row["of"] != "Qwen3-8B",
    ),
    "fp8_error": Table(
        ["cpu/fp8_error.json"],
        [
            Column("rows", "rows"),
            *(c for k in ("y", "dx", "dkernel") for c in each(FP8, f"{k}, {{}}", k, "{:.1%}")),
        ],
        ("rows",),
    ),
    "fp8_losses": Table(
        ["cpu/fp8_losses.json"],
        [
            number("seed", "seed"),
            *each(FORMS, "{}, last steps", "last_loss", "{:.3f}"),
            *each(FORMS, "{}, validation", "validation_loss", "{:.3f}"),
        ],
        ("seed",),
    ),
    "tpu_memory": Table(
        ["planned/tpu_memory_v5e.json"],
        [
            Column("", "of"),
            Column("plain JAX", show_peak, only={"name": "plain JAX"}),
            Column("`jax.checkpoint`", show_peak, only={"name": "jax.checkpoint"}),
            Column("**effjax**", show_peak, only={"name": "effjax"}),
            mb("effjax, host", "planned_host", name="effjax"),
        ],
        ("of",),
    ),
}
PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.S)


def update_tables(text: str) -> str:
    """Return the text of a page with its tables written anew."""
    return PLACE.sub(
        lambda place: f"{place[1]}\n{TABLES[place[2]].as_markdown()}\n{place[3]}", text
    )


def pages_with_tables() -> list[Path]:
    """Return the pages, which may have tables."""
    return sorted([*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")])


def main() -> None:
    for page in pages_with_tables():
        page.write_text(update_tables(page.read_text()))


if __name__ == "__main__":
    main()
