"""What `import effjax` costs, and which package may import which."""

import ast
import os
import pathlib
import subprocess
import sys

import effjax

PACKAGE = pathlib.Path(effjax.__file__).parent

# What each part may import of the third-party packages and of effjax itself.
ALLOWED = {
    "ops": {"jax", "numpy", "effjax.ops", "effjax.native"},
    "memory": {
        "jax",
        "numpy",
        "rich",
        "matplotlib",
        "effjax.memory",
        "effjax.ops",
        "effjax.native",
    },
    "linen": {
        "jax",
        "flax",
        "effjax.ops",
        "effjax.linen",
        "effjax._densenet",
        "effjax._deform_conv",
    },
    "nnx": {"jax", "flax", "effjax.ops", "effjax.nnx", "effjax._densenet", "effjax._deform_conv"},
}
# These look at models and training, and nothing looks back.
COMMANDS = {"memory/command.py", "memory/training_steps.py", "memory/lm_steps.py"}


def _imports(file: pathlib.Path) -> set[str]:
    """Absolute names of all that `file` imports, `effjax.<part>` for what is its own."""
    package = ["effjax", *file.relative_to(PACKAGE).parts[:-1]]
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names.append(".".join([*base, *([node.module] if node.module else [])]))
    own, others = (
        [n for n in names if n.startswith("effjax")],
        [n for n in names if "effjax" not in n],
    )
    top = {n.split(".")[0] for n in others} - sys.stdlib_module_names
    return top | {".".join(n.split(".")[:2]) for n in own}


def test_arrows_point_one_way():
    for part, allowed in ALLOWED.items():
        for file in (PACKAGE / part).rglob("*.py"):
            if file.relative_to(PACKAGE).as_posix() in COMMANDS:
                continue
            extra = _imports(file) - allowed
            assert not extra, f"{file.relative_to(PACKAGE)} must not import {sorted(extra)}"


def test_import_is_light():
    code = """
import sys
import effjax
heavy = {"flax", "optax", "orbax", "matplotlib", "sklearn", "typer", "rich"} & set(sys.modules)
assert not heavy, heavy
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
"""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, env=env)


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
    assert effjax.__version__.count(".") == 2
