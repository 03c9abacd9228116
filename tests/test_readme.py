"""README and the pages of docs: their Python blocks run, their links lead somewhere, their numbers
are those that were measured."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import pathlib
import pkgutil
import re
import subprocess
import sys
import tempfile
import tomllib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from jax.sharding import PartitionSpec as P

import effjax
from benchmarks.__main__ import SUBJECTS
from benchmarks.timing import fit_exponent
from effjax.cli.app import app
from tests.programs import has_gpu_compiler
from tests.tiers import exhaustive

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
PAGES = [README, *sorted(ROOT.glob("docs/*.md")), *GUIDES]
# Whose blocks wait for --exhaustive.
DEAR = {"from_torch", "roi", *(page.stem for page in GUIDES if page.stem != "porting")}
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
MEASURED = ROOT / "docs" / "measured"
CONVOLUTIONS = "torchvision", "plain XLA", "effjax native"
IN_MEMORY = "in memory", "in memory, remat"
DTYPES = "float32", "bfloat16"
FEATURES = 'effjax save="features"'
NOT_INSTALLED = {"equinox": r"\beqx\b", "grain": r"\bgrain\b"}  # and how blocks call them


def blocks(page, language):
    """(line, text) of each block of code."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


def execute(page, line, code, names):
    """Runs one block."""
    exec(compile("\n" * line + code, page, "exec"), names)


def runs_here(code):
    """The planner needs pip install 'effjax[plan]', and guides packages that nothing installs."""
    for package, name in NOT_INSTALLED.items():
        if re.search(name, code) and importlib.util.find_spec(package) is None:
            return False
    return "import plan" not in code or has_gpu_compiler()


EXAMPLES = pytest.mark.parametrize(
    ("line", "code"), [pytest.param(*b, id=f"line {b[0]}") for b in blocks(README, "python")]
)


@functools.cache
def run(page):
    """Runs the Python blocks of a page, in order, as one program; returns its names."""
    names = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):  # some write files
        for line, code in filter(lambda block: runs_here(block[1]), blocks(page, "python")):
            execute(page, line, code, names)
    return names


def tiered(page):
    return exhaustive(page) if page.stem in DEAR else page


@pytest.mark.parametrize(
    "page", [tiered(p) for p in PAGES[1:] if blocks(p, "python")], ids=lambda p: p.stem
)
def test_python_blocks_run(page, capsys):
    run(page)


@EXAMPLES
def test_blocks_of_readme_run_alone(line, code, capsys):
    if runs_here(code):
        execute(README, line, code, {"__name__": "readme"})


@pytest.mark.exhaustive
@EXAMPLES
def test_blocks_of_readme_run_in_a_fresh_interpreter(line, code):
    if runs_here(code):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_both_ways_of_reducing_gradients(mesh8):
    """They give the gradient of the whole batch's mean."""
    names = run(ROOT / "docs" / "batch_norm.md")
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    scale = jnp.linspace(0.5, 2, 4)
    expected = jax.grad(lambda s: jnp.mean(jnp.sin(effjax.sync_batch_norm(x, s)[0])))(scale)
    pmapped = jax.pmap(names["pmapped_step"], "data", in_axes=(None, 0))(scale, x.reshape(8, 2, 4))
    specs = dict(mesh=mesh8, in_specs=(P(), P("data")), out_specs=P())
    mapped = jax.jit(jax.shard_map(names["shard_mapped_step"], **specs))(scale, x)
    np.testing.assert_allclose(pmapped[0], expected, atol=1e-6)
    np.testing.assert_allclose(mapped, expected, atol=1e-6)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150
    for line, block in blocks(README, "python"):
        code = [row for row in block.splitlines() if row.strip() and not row.startswith("#")]
        assert len(code) <= 10, f"README.md, line {line}: an example of {len(code)} lines"


def test_readme_has_two_commands():
    """As `.ci/run` reads them."""
    commands = [block.strip() for _, block in blocks(README, "bash")]
    assert commands == [
        'pip install ".[train]" && effjax train densenet',
        'pip install -e ".[test]" && pytest',
    ]


def test_readme_says_where_to_clone_it_from():
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    line = f"git clone {source} && cd {source.rpartition('/')[2]}"
    text = README.read_text()
    assert 0 < text.find(line) < text.find("```bash")


def test_the_page_of_offload_names_the_limit_of_the_host():
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in (ROOT / "docs" / "offload.md").read_text()


def anchors(page):
    """Of the headings, as they are written in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings}


def cells(notebook, kind):
    """All cells of a kind as one text, without IPython's own commands."""
    found = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in found if c["cell_type"] == kind)
    return re.sub(r"^( *)%\w.*$", r"\1pass", text, flags=re.M) if kind == "code" else text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_open_anywhere_and_show_their_outputs(notebook):
    """A badge, a cell that installs effjax where it is not, and the outputs of a run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = project["urls"]["Source"]
    found = json.loads(notebook.read_text())["cells"]
    first, install, *rest = ("".join(cell["source"]) for cell in found)
    file = f"{source.removeprefix('https://github.com/')}/blob/main/notebooks/{notebook.name}"
    assert f"(https://colab.research.google.com/github/{file})" in first
    extras, url = re.findall(r'%pip install -q "effjax\[(.*)\] @ git\+(.*)"', install)[0]
    assert url == source and f'pip install "effjax[{extras}]"' in first
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "find_spec" in install and not any("%pip" in text for text in rest)
    outputs = [output for cell in found for output in cell.get("outputs", ())]
    shown = sum(bool(cell.get("outputs")) for cell in found)
    assert shown > sum(cell["cell_type"] == "code" for cell in found) / 3
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(found))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_use_public_names(notebook):
    """What the `__init__` of a package exports that a page names."""
    pages = "".join(page.read_text() for page in PAGES)
    for node in ast.walk(ast.parse(cells(notebook, "code"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("effjax"):
            module = importlib.import_module(node.module or "")
            assert hasattr(module, "__path__") and f"`{module.__name__}" in pages, module
            exported = {n for n, v in vars(module).items() if not isinstance(v, types.ModuleType)}
            assert {alias.name for alias in node.names} <= exported, module


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    if page.suffix == ".ipynb":
        text = cells(page, "markdown")
    else:
        text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target, _, anchor = "".join(link).partition("#")
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_linked_to():
    for page in PAGES[1:]:
        if page.name not in ("README.md", "index.md"):
            link = page.relative_to(ROOT / "docs").as_posix()
            assert page in GUIDES or f"(docs/{link})" in README.read_text(), link
            assert f"({link})" in (ROOT / "docs/README.md").read_text(), link


def test_the_reference_has_every_public_name():
    """What a module exports is on the page of its name, and nothing else is."""
    for page in ROOT.glob("docs/reference/effjax*.md"):
        module = importlib.import_module(page.stem)
        source = pathlib.Path(module.__file__ or "").read_text()
        exported = re.findall(r"^from .* import (\w+) as \1$|^def ([a-z]\w+)", source, re.M)
        listed = re.findall(r"^(?:\.\. (?:auto\w+|data)::| {9}) (\w+)$", page.read_text(), re.M)
        assert sorted(map("".join, exported)) == sorted(listed), page.name


@pytest.mark.filterwarnings("ignore:.* has moved to .*:DeprecationWarning")
def test_names_in_the_pages_exist():
    texts = "".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"`(effjax(?:\.\w+)+)[`(]", texts)):
        pkgutil.resolve_name(name)


def test_named_modules_exist():
    texts = [page.read_text() for page in PAGES]
    names = {
        name for text in texts for name in re.findall(r"-m ((?:effjax|benchmarks)[\w.]*\w)", text)
    }
    for name in names:
        assert importlib.util.find_spec(name), name


def test_named_benchmarks_exist():
    for page in PAGES:
        for arguments in re.findall(r"-m benchmarks ([^`\n]+)", page.read_text()):
            names = [word for word in arguments.partition(" --")[0].split() if word != "--list"]
            assert {*names} <= {"all", *SUBJECTS}, f"{page.name}: {arguments}"


def test_records_name_their_folder():
    for path in MEASURED.rglob("*.json"):
        command = json.loads(path.read_text())["command"]
        folder = path.parent.relative_to(ROOT)
        assert f"--json {folder}" in command or f"--out {folder}" in command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_have_the_options_shown(page):
    group: Any = typer.main.get_command(app)
    lines = "\n".join(code for _, code in blocks(page, "bash")).splitlines()
    for line in lines:
        if "effjax " not in line or "python -m" in line:
            continue
        command = group
        for word in line.partition("effjax ")[2].split():
            if word.startswith("--"):
                assert word in {name for option in command.params for name in option.opts}, line
            elif hasattr(command, "commands"):
                command = command.commands[word]


def table_rows(page):
    """The rows of a page's tables, as lists of cells without emphasis."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[re.sub(r"\*\*|`", "", cell).strip() for cell in row.split("|")[1:-1]] for row in lines]


def measured(file):
    """The rows of a JSON file by name; of the deepest model, where it has several depths."""
    return {row["name"]: row for row in json.loads((MEASURED / file).read_text())["rows"]}


def block_rows():
    """Tables of a dense block: peak by depth; temporaries and CPU time."""
    files = MEASURED.glob("planned/memory_block_*_h200.json")
    by_depth = sorted((int(path.stem.split("_")[2]), measured(path)) for path in files)
    planned = by_depth[-1][1]
    fast, slow = (measured(f"cpu/dense_block_{n}_float32.json") for n in (24, 48))
    for name in planned:
        peaks = [rows[name]["peak_bytes"] for _, rows in by_depth]
        power = fit_exponent([depth for depth, _ in by_depth], peaks)
        yield [name, *(f"{peak / 1e6:.0f}" for peak in peaks), f"{power:.2f}"]
        ratios = [f"{rows[name]['ratio']:.2f}×" for rows in (fast, slow)]
        temporaries = [f"{rows[name]['temp_bytes'] / 1e6:.0f}" for rows in (planned, slow)]
        yield [name, temporaries[0], *ratios, temporaries[1]]


def kept_rows():
    """Of a dense block, by depth."""
    by_name = {}
    for row in json.loads((MEASURED / "growth/depth_kept.json").read_text())["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    for name, rows in by_name.items():
        kept = (f"{row['kept_bytes'] / 1e6:.0f}" for row in rows)
        yield [name, *kept, f"{rows[-1]['exponent']:.2f}"]


def batch_norm_rows():
    half, single = (measured(f"cpu/batch_norm_{dtype}.json") for dtype in ("bfloat16", "float32"))
    for name in single:
        both = single[name], half[name]
        yield [name, *(f"{row['ratio']:.2f}×" for row in both), *(f"{row['kept']}" for row in both)]


def densenet_rows():
    names = ["plain, Flax's BatchNorm", "jax.checkpoint a layer"]
    names += ['effjax save="conv"', FEATURES]
    rows = measured("planned/memory_densenet_100_h200.json").values()
    for name, row in zip(names, rows, strict=True):
        yield [name, f"{row['peak_bytes'] / 1e6:.0f}"]


def faster_than_torchvision(file):
    """The least and the largest ratio of all runs, on two machines."""
    runs = [
        measured(file),
        *map(measured, sorted(MEASURED.glob(f"again/*/{pathlib.Path(file).name}"))),
    ]
    assert len(runs) == 5
    ratios = [run["torchvision"]["seconds"] / run["effjax native"]["seconds"] for run in runs]
    return f"{min(ratios):.0f}–{max(ratios):.0f}×"


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
    for name, row in measured("planned/deform_conv_sass.json").items():
        if "float16" not in name.split():
            counts = f"{row['a_pack']:.0f}", row["budget"], row["loads_in_flight"], row["registers"]
            yield [name, *map(str, counts)]


def deform_attention_rows():
    files = [f"deform_attention_{queries}" for queries in (300, 22223)]
    runs = [measured(f"cpu/{f}_forward{more}.json") for f in files for more in ("", "_backward")]
    planned = [measured(f"planned/{file}_h200.json") for file in files]
    for name in ("packed gather", "effjax xla", "effjax native"):
        milliseconds = [f"{1e3 * run[name]['seconds']:.0f}" for run in runs]
        times = " / ".join(milliseconds[:2]), " / ".join(milliseconds[2:])
        yield [name, *times, *(f"{plan[name]['temp_bytes'] / 1e6:.0f}" for plan in planned)]


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
    file = MEASURED / "planned/offload_adam_1024_float32_h200.json"
    by_name = {}
    for row in json.loads(file.read_text())["rows"]:
        by_name.setdefault(row["name"], []).append(row)
    for name, rows in by_name.items():
        device = [f"{row['planned_device_bytes'] / 1e9:.2f}" for row in rows]
        name = "jax.checkpoint a layer" if name == "in memory, remat" else name
        yield [name, *device, f"{rows[-1]['planned_host_bytes'] / 1e9:.2f}"]


def cross_entropy_rows():
    file = MEASURED / "planned/cross_entropy_32768_h200.json"
    by_name = {}
    for row in sorted(json.loads(file.read_text())["rows"], key=lambda row: row["of"]):
        by_name.setdefault(row["name"], []).append(f"{row['peak_bytes'] / 1e6:.0f}")
    for name, peaks in by_name.items():
        yield [name, *peaks]


TABLES = [block_rows, batch_norm_rows, densenet_rows, deform_conv_rows, offload_rows]
TABLES += [kept_rows, cross_entropy_rows, deform_attention_rows, roi_rows, sass_rows]


def updated_in_the_backward_pass_rows():
    names = {"in memory, remat": "jax.checkpoint a layer, then optax"}
    names["in memory, fused update"] = "updated in the backward pass"
    for name, shown in names.items():
        files = (f"planned/offload_{tx}_1024_float32_h200.json" for tx in ("adam", "sgd"))
        rows = [row for f in files for row in json.loads((MEASURED / f).read_text())["rows"]]
        chosen = [r for r in rows if r["name"] == name and r["layers"] in (8, 32)]
        yield [shown, *(f"{row['planned_device_bytes'] / 1e9:.2f}" for row in chosen)]


def beside_peers_rows():
    for name, row in measured("planned/offload_peers_h200.json").items():
        device, host = (
            f"{row[f'planned_{where}_bytes'] / 1e9:.1f}" for where in ("device", "host")
        )
        yield [name, device, f"{row['ratio']:.3f}", host]


def gh200_rows():
    """By depth; the deepest by host memory."""
    records = json.loads((MEASURED / "planned/offload_bracket_gh200.json").read_text())["rows"]
    for name in dict.fromkeys(row["name"] for row in records):
        rows = [row for row in records if row["name"] == name]
        device = (f"{row['planned_device_bytes'] / 1e9:.1f}" for row in rows)
        yield [name, *device, *(f"{row['planned_host_bytes'] / 1e9:.1f}" for row in rows)]
    sizes = [f"{row['parameters'] / 1e9:.2f} B" for row in rows]
    yield ["", *sizes, *(f"host, {size}" for size in sizes)]
    for row in json.loads((MEASURED / "planned/offload_largest_gh200.json").read_text())["rows"]:
        gigabytes = (row[f"planned_{w}_bytes"] / 1e9 for w in ("host", "device"))
        size = f"{row['layers']} of width {row['width']}", f"{row['parameters'] / 1e9:.1f}"
        yield [f"{row['host_bytes'] / 1e9:.0f}", *size, *(f"{gb:.1f}" for gb in gigabytes)]


def resnet_rows():
    for name, row in measured("planned/resnet50_256_h200.json").items():
        yield [name, f"{row['peak_bytes'] / 1e9:.2f}", f"{row['ratio']:.2f}"]


OFFLOAD_TABLES = [updated_in_the_backward_pass_rows, beside_peers_rows, gh200_rows]


@pytest.mark.parametrize("rows_of", OFFLOAD_TABLES)
def test_tables_of_the_page_on_offload(rows_of):
    shown = table_rows(ROOT / "docs" / "offload.md")
    for row in rows_of():
        assert row in shown


def test_table_of_the_page_on_resnets():
    shown = table_rows(ROOT / "docs" / "resnet.md")
    assert all(row in shown for row in resnet_rows())


@pytest.mark.parametrize("rows_of", TABLES)
def test_tables_are_what_was_measured(rows_of):
    shown = table_rows(ROOT / "docs" / "measured.md")
    for row in rows_of():
        assert row in shown


def test_readme_has_measured_numbers():
    densenet = measured("planned/memory_densenet_100_h200.json")
    block = measured("cpu/dense_block_24_float32.json")
    convolution = "cpu/deform_conv_8x56x56x64_1_forward_backward.json"
    conv = measured(convolution)
    model = measured("planned/offload_adam_1024_float32_h200.json")
    fused = model["all offloaded, fused update"]
    flax = [measured(f"cpu/batch_norm_{dtype}.json")["Flax BatchNorm"] for dtype in DTYPES]
    picture = measured("planned/memory_block_48_h200.json")
    numbers = [
        *(f"{densenet[n]['peak_bytes'] / 1e6:.0f} MB" for n in densenet if n != "effjax conv"),
        *(f"{row['kept']} ({dtype})" for row, dtype in zip(flax, DTYPES, strict=True)),
        *(f"{block[n]['seconds']:.2f} s" for n in ("plain autodiff", 'effjax save="conv"')),
        *(f"{1e3 * conv[n]['seconds']:.0f} ms" for n in CONVOLUTIONS),
        faster_than_torchvision(convolution),
        *(f"{model[n]['planned_device_bytes'] / 1e9:.2f} GB" for n in IN_MEMORY),
        *(f"{fused[f'planned_{where}_bytes'] / 1e9:.2f} GB" for where in ("device", "host")),
        f"plain {picture['plain autodiff']['peak_bytes'] / 1e9:.1f} GB",
        f"layer {picture['jax.checkpoint a layer']['peak_bytes'] / 1e9:.1f} GB",
        f"effjax {picture[FEATURES]['peak_bytes'] / 1e9:.2f} GB",
    ]  # fmt: skip
    text = README.read_text().replace("**", "")
    assert not [number for number in numbers if number not in text]
