"""The package: allowed imports, import cost, and names."""

import ast
import functools
import graphlib
import os
import pathlib
import subprocess
import sys

import pytest

import effjax

PACKAGE = pathlib.Path(effjax.__file__).parent
MODULES = {
    ".".join(["effjax", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): file
    for file in PACKAGE.rglob("*.py")
}

FLAX = "jax numpy flax"
# Folders of effjax, and third-party packages, that each folder may import.
RULES = {
    "effjax": ("ops _names _version", ""),
    "__main__": ("cli", ""),
    "_extras": ("", ""),
    "_files": ("", ""),
    "_names": ("", ""),
    "_slices": ("", "jax numpy"),
    "_version": ("", ""),
    "compat": ("ops", "jax"),
    "native": ("", "jax"),
    "ops": ("native", "jax numpy"),
    "layers": ("ops", "jax numpy"),
    "linen": ("layers ops _names", FLAX),
    "nnx": ("layers ops _names", FLAX),
    "models": ("linen nnx layers ops _files _names", f"{FLAX} chex"),
    "convert": ("models ops _files _names _slices", f"{FLAX} orbax huggingface_hub"),
    "memory": ("ops native _extras _files _names", "jax numpy rich matplotlib platformdirs"),
    "optimizers": ("", "jax optax"),
    "validation": ("_slices memory models native ops train train.text", "jax numpy"),
    "train": (
        "_extras _files _names _slices _version models optimizers",
        "jax numpy optax orbax tensorstore rich matplotlib tensorboard",
    ),
    "train.images": (
        "_extras _version train memory models convert",
        f"{FLAX} optax rich sklearn PIL",
    ),
    "train.detection": (
        "_extras _version train train.images train.text models convert",
        f"{FLAX} optax PIL pycocotools",
    ),
    "train.text": (
        "_extras _version train models convert ops",
        "jax numpy optax rich tokenizers transformers jinja2 huggingface_hub datasets",
    ),
    "cli": (
        "_extras _files _version train train.detection train.images train.text memory models "
        "native convert ops validation",
        "jax rich typer matplotlib yaml",
    ),
}
INTERNAL, EXTERNAL = (
    {folder: set(rules[i].split()) for folder, rules in RULES.items()} for i in (0, 1)
)


def _folder(module: str) -> str:
    """Return the folder of a module, as a key of INTERNAL."""
    parts = module.split(".")[1:]
    if not parts:
        return "effjax"
    two = ".".join(parts[:2])
    return two if parts[0] == "train" and (PACKAGE / two.replace(".", "/")).is_dir() else parts[0]


@functools.cache
def _imports(module: str) -> tuple[set[str], set[str]]:
    """Return the modules of effjax and the other packages that a file imports at run time."""
    file, own, other = MODULES[module], set(), set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else base for name in names]
        else:
            continue
        own |= {name for name in names if name.split(".")[0] == "effjax"}
        other |= {name.split(".")[0] for name in names} - {"effjax"} - sys.stdlib_module_names
    return own - {module}, other


def test_every_folder_has_rules():
    folders = {_folder(module) for module in MODULES}
    assert folders == set(RULES) and set().union(*INTERNAL.values()) <= folders


@pytest.mark.parametrize("folder", INTERNAL)
def test_allowed_imports(folder):
    for module in filter(lambda module: _folder(module) == folder, MODULES):
        own, other = _imports(module)
        forbidden = {_folder(name) for name in own} - {folder} - INTERNAL[folder]
        forbidden |= other - EXTERNAL[folder]
        assert not forbidden, f"{module} must not import {sorted(forbidden)}"


def test_folders_and_files_have_no_import_cycle():
    for graph in (INTERNAL, {module: _imports(module)[0] for module in MODULES}):
        tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_import_cost():
    """Check that `import effjax` imports no package, and that its operators import only JAX."""
    code = """
import sys
import effjax
others = {name.split(".")[0] for name in sys.modules} - {"effjax"} - sys.stdlib_module_names
assert "jax" not in others and "numpy" not in others, others
import jax
before = set(sys.modules)
effjax.sync_batch_norm, effjax.offload_scan, effjax.deform_conv2d
added = set(sys.modules) - before
others = {name.split(".")[0] for name in added} - {"effjax", "jax"} - sys.stdlib_module_names
assert not others, others
folders = {name.split(".")[1] for name in added if name.startswith("effjax.")}
assert folders == {"ops", "native"}, folders
heavy = {"flax", "optax", "numpy.testing", "jax.experimental.pallas"} & set(sys.modules)
assert not heavy, heavy
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
for name in (
    "compat", "convert", "linen", "memory", "models", "native", "nnx", "optimizers", "train"
):
    assert name in dir(effjax)
    assert getattr(effjax, name).__name__ == f"effjax.{name}"
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, env=env)


def test_import_star_imports_the_operators_only():
    # `nnx` and `linen` are names of Flax in most programs.
    names: dict = {}
    exec("from effjax import *", names)
    assert names.keys() - {"__builtins__"} == set(effjax.__all__)
    assert all(callable(names[name]) for name in effjax.__all__)


def test_unknown_name():
    with pytest.raises(AttributeError, match="'effjax' has no attribute 'dense_blok'"):
        effjax.dense_blok  # noqa: B018


def test_python_m_effjax():
    command = [sys.executable, "-m", "effjax", "--version"]
    done = subprocess.run(command, check=True, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout == f"effjax {effjax.__version__}\n"


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
