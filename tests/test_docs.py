"""Documentation: Python blocks run, links resolve, names, options and files exist."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import pathlib
import pkgutil
import re
import tempfile
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from flax import nnx

import effjax
import effjax.nnx
from benchmarks.__main__ import SUBJECTS
from effjax.cli.app import app
from tests.programs import why_not

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
PAGES = [README, *sorted(ROOT.glob("docs/*.md")), *GUIDES]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
MEASURED = ROOT / "docs" / "measured"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL_PACKAGES = {
    "equinox": r"\beqx\b",
    "grain": r"\bgrain\b",
    "libtpu": r"\btopologies\b",
}  # and their names in code


def blocks(page, language):
    """Return (line, text) of each code block."""
    text = page.read_text()
    matches = re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in matches]


def execute(page, line, code, names):
    """Run one block."""
    exec(compile("\n" * line + code, page, "exec"), names)


def can_run(code):
    """Return True if the packages and the compiler that a block needs are installed."""
    for package, name in OPTIONAL_PACKAGES.items():
        if re.search(name, code) and importlib.util.find_spec(package) is None:
            return False
    if re.search(r'target="(v\d|tpu)', code) and why_not("tpu"):
        return False
    return not re.search("import (plan|compare)", code) or not why_not("cuda")


@functools.cache
def run_page(page):
    """Run the Python blocks of a page, in order, as one program. Return its names."""
    names = {"__name__": page.stem}
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):  # blocks may write files
        for line, code in filter(lambda block: can_run(block[1]), blocks(page, "python")):
            execute(page, line, code, names)
    return names


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "page", [p for p in PAGES[1:] if blocks(p, "python")], ids=lambda page: page.stem
)
def test_python_blocks_run(page, capsys):
    """One of these pages runs in the plain tier too, below."""
    run_page(page)


def makes_mesh(page):
    """Return True if the code of a page makes a mesh with JAX's default axes."""
    return any("jax.make_mesh(" in code for _, code in blocks(page, "python"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", list(filter(makes_mesh, PAGES)), ids=lambda page: page.stem)
def test_python_blocks_run_over_auto_axes(page, monkeypatch, capsys):
    """The test above runs them as they are, over Explicit axes."""
    make_mesh, auto = jax.make_mesh, jax.sharding.AxisType.Auto
    assert make_mesh((1,), ("i",)).axis_types == (jax.sharding.AxisType.Explicit,)
    monkeypatch.setattr(
        jax, "make_mesh",
        lambda shape, names, **options: make_mesh(shape, names, (auto,) * len(names), **options),
    )  # fmt: skip
    run_page.__wrapped__(page)


def test_readme_blocks_run_separately(capsys):
    for line, code in blocks(README, "python")[:-1]:
        if can_run(code):
            execute(README, line, code, {"__name__": "readme"})


def test_readme_shows_what_the_planner_prints(capsys):
    (line, code), (_, shown) = blocks(README, "python")[-1], blocks(README, "text")[0]
    if can_run(code):
        execute(README, line, code, {"__name__": "readme"})
        printed, shown = capsys.readouterr().out.splitlines(), shown.splitlines()
        assert printed[3] == "" and len(shown) == 3
        number = r"[0-9.]+"
        for ours, row in zip(printed, shown, strict=False):
            row = row.removesuffix(" …")
            assert re.sub(number, "N", ours).startswith(re.sub(number, "N", row))
            published = [float(n) for n in re.findall(number, row)]
            ours = [float(n) for n in re.findall(number, ours)][: len(published)]
            assert ours == pytest.approx(published, rel=0.1)


def test_batch_norm_page_reduces_gradients():
    """Check that docs/batch_norm.md, like the page on pmap, computes the mean loss's gradient."""
    names = run_page(ROOT / "docs" / "batch_norm.md")
    x = np.asarray(names["x"])
    loss = lambda scale: jnp.mean(jnp.sin(effjax.sync_batch_norm(x, scale)[0]))  # noqa: E731
    expected = jax.jit(jax.grad(loss))(names["scale"])
    np.testing.assert_allclose(names["grads"], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_average_of_parameters_moves(dtype):
    """Check docs/guides/accumulation_and_ema.md for 200 updates from 1 towards parameters of 2."""
    names = run_page(ROOT / "docs" / "guides" / "accumulation_and_ema.md")
    layers = lambda value: effjax.to_host({"kernel": jnp.full((2, 4, 4), value, dtype)})  # noqa: E731
    average = names["start_average"](layers(1))
    for _ in range(200):
        average = names["update_average"](average, layers(2))
    expected = 2 - (1 - names["FACTOR"]) ** 200
    np.testing.assert_allclose(np.asarray(average["kernel"]), expected, rtol=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_style_of_code(page):
    for language in ("python", "bash", "sh", "text", "math"):
        for line, block in blocks(page, language):
            wide = [row for row in block.splitlines() if len(row) > 85]
            assert not wide, f"{page.name}, block at line {line}"
    code = "".join(block for _, block in blocks(page, "python"))
    assert "Explicit" in page.read_text() or not makes_mesh(page), "name the axes of the mesh"
    assert "AxisType.Auto" not in code and "sharding.Mesh(" not in code, "use explicit meshes"
    assert page.stem == "pmap" or "jax.pmap(" not in code, "pmap has a page of its own"


def test_readme_is_short_and_has_two_commands():
    assert len(README.read_text().splitlines()) <= 120
    for line, block in blocks(README, "python"):
        code = [row for row in block.splitlines() if row.strip() and not row.startswith("#")]
        assert len(code) <= 10, f"README.md, line {line}: an example of {len(code)} lines"
    # .ci/run reads and runs the commands.
    commands = [block.strip() for _, block in blocks(README, "bash")]
    assert commands == [
        'pip install ".[train]" && effjax train densenet',
        'pip install -e ".[test]" && pytest',
    ]


def test_pages_name_no_repository_and_distribution_that_do_not_exist():
    """Check for a link to a repository or a `pip install` that works for nobody."""
    source = PROJECT.get("urls", {}).get("Source")  # set once it is public
    for page in (*PAGES, ROOT / "CITATION.cff", ROOT / "docs/conf.py"):
        text = page.read_text().replace(source, "") if source else page.read_text()
        assert "github.com/effjax" not in text, page.name
        assert not re.search(r"pip install [^`\n&]*\beffjax\b", text), page.name
    assert "In a clone of this repository" in README.read_text().partition("```bash")[0]


def anchors(page):
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings}


def cells(notebook, kind):
    """Return all cells of a kind as one text, without IPython magics."""
    found = json.loads(notebook.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in found if c["cell_type"] == kind)
    return re.sub(r"^( *)%\w.*$", r"\1pass", text, flags=re.M) if kind == "code" else text


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_install_and_have_outputs(notebook):
    """Check the cell that installs effjax from the clone, and the saved outputs."""
    found = json.loads(notebook.read_text())["cells"]
    first, install, *rest = ("".join(cell["source"]) for cell in found)
    (extras,) = re.findall(r'%pip install -q "\.\.\[(.*)\]"', install)
    assert f'pip install ".[{extras}]"' in first
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert "find_spec" in install and not any("%pip" in text for text in rest)
    outputs = [output for cell in found for output in cell.get("outputs", ())]
    shown = sum(bool(cell.get("outputs")) for cell in found)
    assert shown > sum(cell["cell_type"] == "code" for cell in found) / 3
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(found))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_use_public_names(notebook):
    """Check that notebooks import only names of documented packages."""
    pages = "".join(page.read_text() for page in PAGES)
    for node in ast.walk(ast.parse(cells(notebook, "code"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("effjax"):
            module = importlib.import_module(node.module or "")
            assert hasattr(module, "__path__") and f"`{module.__name__}" in pages, module
            names = {alias.name for alias in node.names}
            assert names <= {n for n in dir(module) if n[0] != "_"}, module


def test_before_and_after_compute_the_same():
    """Run both programs of the picture before_after.svg."""
    pytest.importorskip("matplotlib")
    draw = importlib.import_module("docs.draw")
    losses = []
    for program in (draw.BEFORE, draw.AFTER):
        rngs = nnx.Rngs(0)
        names = dict(
            effjax=effjax, nnx=nnx, tx=optax.adam(1e-2),
            layers=[nnx.Linear(4, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 3, rngs=rngs)],
            cross_entropy=optax.softmax_cross_entropy_with_integer_labels,
        )  # fmt: skip
        exec(program, names)
        x, labels = jax.random.normal(jax.random.key(0), (6, 4)), jnp.arange(6) % 3
        step = names["train_step"]
        losses.append([float(step(names["model"], names["optimizer"], x, labels)) for _ in "123"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda p: p.name)
def test_links_resolve(page):
    text = cells(page, "markdown") if page.suffix == ".ipynb" else page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target, _, anchor = "".join(link).partition("#")
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_linked():
    assert "(docs/README.md)" in README.read_text()
    for page in PAGES[1:]:
        if page.name not in ("README.md", "index.md"):
            link = page.relative_to(ROOT / "docs").as_posix()
            assert f"({link})" in (ROOT / "docs/README.md").read_text(), link


def test_landing_page_shows_the_first_screen_of_readme():
    options = re.findall(r"^:(start-after|end-before): \"(.*)\"$", INDEX.read_text(), re.M)
    start, end = (dict(options)[name] for name in ("start-after", "end-before"))
    text = README.read_text().partition(start)[2].partition(end)[0]
    assert "**None has run on a GPU.**" in text and "## Will it fit?" in text


def test_named_functions_modules_and_benchmarks_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"`(effjax(?:\.\w+)+)[`(]", text)):
        pkgutil.resolve_name(name)
    for name in set(re.findall(r"-m ((?:effjax|benchmarks)[\w.]*\w)", text)):
        assert importlib.util.find_spec(name), name
    for arguments in re.findall(r"-m benchmarks ([^`\n]+)", text):
        names = [word for word in arguments.partition(" --")[0].split() if word != "--list"]
        assert {*names} <= {"all", *SUBJECTS}, arguments


def test_records_name_their_folder():
    for path in MEASURED.rglob("*.json"):
        command = json.loads(path.read_text())["command"]
        folder = path.parent.relative_to(ROOT)
        assert f"--json {folder}" in command or f"--out {folder}" in command


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_shown_options_exist(page):
    group: Any = typer.main.get_command(app)
    code = "\n".join(code for _, code in blocks(page, "bash"))
    lines = code.replace("\\\n", "").splitlines()  # join continued lines
    for line in lines:
        if "effjax " not in line or "python -m" in line:
            continue
        command = group
        for word in line.partition("effjax ")[2].split():
            if word.startswith("--"):
                options = command.params
                names = {n for o in options for n in (*o.opts, *o.secondary_opts)}
                assert word in names, line
            elif hasattr(command, "commands"):
                command = command.commands[word]
