"""What `import effjax` costs, and which file may import which."""

import ast
import graphlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

import effjax

PACKAGE = pathlib.Path(effjax.__file__).parent
SOURCE = pathlib.Path(effjax.__file__).read_text()
MODULES = {
    ".".join(["effjax", *file.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
        ".__init__"
    ): file
    for file in PACKAGE.rglob("*.py")
}

TASKS = ("train.data", "train.images", "train.lm")
# What each room may import: of effjax below itself, and of third parties.
OWN = {
    "effjax": {"ops"},
    "__main__": {"cli"},
    "_unpickle": set(),
    "compat": {"nnx", "ops"},
    "native": set(),
    "ops": {"native"},
    "layers": {"ops"},
    "linen": {"layers", "ops"},
    "nnx": {"layers", "ops"},
    "models": {"linen", "nnx", "layers", "ops"},
    "convert": {"models", "_unpickle"},
    "memory": {"ops", "native"},
    "train": set(),
    "train.data": {"train", "_unpickle"},
    "train.images": {"effjax", "train", "train.data", "memory", "models"},
    "train.lm": {"effjax", "train", "train.data", "memory", "models", "ops"},
    "cli": {
        "effjax",
        "train",
        "train.images",
        "train.lm",
        "memory",
        "models",
        "native",
        "convert",
    },
}
FLAX = {"jax", "numpy", "flax"}
THIRD = {
    "effjax": set(),
    "__main__": set(),
    "_unpickle": set(),
    "compat": {"jax", "flax"},
    "native": {"jax"},
    "ops": {"jax", "numpy"},
    "layers": {"jax", "numpy"},
    "linen": FLAX,
    "nnx": FLAX,
    "models": FLAX | {"chex"},
    "convert": FLAX | {"safetensors", "orbax"},
    "memory": {"jax", "numpy", "rich", "matplotlib"},
    "train": {"jax", "numpy", "orbax", "rich", "matplotlib"},
    "train.data": {"numpy", "sklearn", "PIL"},
    "train.images": FLAX | {"optax", "rich"},
    "train.lm": FLAX | {"optax", "rich"},
    "cli": {"jax", "rich", "typer", "matplotlib"},
}


def _room(module: str) -> str:
    """The folder that a module lies in, as a key of OWN."""
    parts = module.split(".")[1:]
    if not parts:
        return "effjax"
    two = ".".join(parts[:2])
    return two if parts[0] == "train" and (PACKAGE / two.replace(".", "/")).is_dir() else parts[0]


def _imports(module: str) -> tuple[set[str], set[str]]:
    """(modules of effjax, other top-level names) that a file imports anywhere, but for types."""
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


def test_every_folder_has_its_rules():
    rooms = {_room(module) for module in MODULES}
    assert rooms == set(OWN) == set(THIRD)
    unknown = {name for allowed in OWN.values() for name in allowed} - rooms
    assert not unknown, unknown


@pytest.mark.parametrize("room", OWN)
def test_arrows_point_one_way(room):
    for module in filter(lambda module: _room(module) == room, MODULES):
        own, other = _imports(module)
        rooms = {_room(name) for name in own} - {room}
        assert rooms <= OWN[room], f"{module} must not import {sorted(rooms - OWN[room])}"
        assert other <= THIRD[room], f"{module} must not import {sorted(other - THIRD[room])}"


def test_rooms_make_no_circle():
    tuple(graphlib.TopologicalSorter(OWN).static_order())  # raises CycleError


def test_files_make_no_circle():
    tuple(graphlib.TopologicalSorter({m: _imports(m)[0] for m in MODULES}).static_order())


def test_import_is_light():
    """`import effjax` imports nothing else, and its operators need only JAX."""
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
rooms = {name.split(".")[1] for name in added if name.startswith("effjax.")}
assert rooms == {"ops", "native"}, rooms
heavy = {"flax", "optax", "numpy.testing", "jax.experimental.pallas"} & set(sys.modules)
assert not heavy, heavy
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
for name in ("compat", "convert", "linen", "memory", "models", "nnx"):
    assert name in dir(effjax)
    assert getattr(effjax, name).__name__ == f"effjax.{name}"
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, env=env)


def test_import_star_imports_the_operators_only():
    """Not `nnx` and `linen`, which are names of Flax in most programs."""
    names: dict = {}
    exec("from effjax import *", names)
    assert names.keys() - {"__builtins__"} == set(effjax.__all__) == effjax._MODULE_OF.keys()
    assert all(callable(names[name]) for name in effjax.__all__)
    # Type checkers know the same names.
    assert set(effjax.__all__) <= set(re.findall(r" as (\w+)$", SOURCE, re.M))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'effjax' has no attribute 'dense_blok'"):
        effjax.dense_blok  # noqa: B018


def test_the_package_is_a_command():
    """`python -m effjax` is `effjax`."""
    command = [sys.executable, "-m", "effjax", "--version"]
    done = subprocess.run(command, check=True, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout == f"effjax {effjax.__version__}\n"


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert effjax.__version__.count(".") == 2
