"""Installation of the compilers into directories of their own."""

import importlib.util
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from effjax.memory import PlanError, plan
from effjax.memory.compiler import packages
from tests.programs import needs_gpu_compiler

X = jax.ShapeDtypeStruct((8,), jnp.float32)
# Stands in for pip: writes the directory that --target names, slowly, and counts its runs.
INSTALLER = """#!{python}
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
folder.mkdir()
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(0.2)
(folder / "plugin.py").touch()
"""


@pytest.fixture
def base(monkeypatch, tmp_path):
    """Return an empty directory of compilers, with a pip that downloads nothing."""
    monkeypatch.setenv(packages.DIRECTORY_VARIABLE, str(tmp_path / "compilers"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the process of pip
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    installer = INSTALLER.format(python=sys.executable, log=str(tmp_path / "log"))
    (tmp_path / "pip" / "__main__.py").write_text(installer)
    return tmp_path / "compilers"


def test_installs_one_time(base, tmp_path, capsys):
    threads = [threading.Thread(target=packages.find_compiler, args=("cuda",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = packages.compiler_directory("cuda")
    base.chmod(0o555)  # a directory that is installed need not be writable
    assert (folder / "plugin.py").exists() and packages.find_compiler("cuda") == folder
    base.chmod(0o755)
    (command,) = (tmp_path / "log").read_text().splitlines()
    assert command.startswith("install ")
    for package in ("jax-cuda13-pjrt", "jax-cuda13-plugin"):
        assert f"{package}=={jax.lib.__version__}" in command
    assert sorted(path.suffix for path in base.iterdir() if path != folder) == [".lock"]
    assert capsys.readouterr().err.count("installed in") == 1


def test_installs_with_uv_where_there_is_no_pip(base, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlanError, match="with pip or uv"):
        packages.find_compiler("cuda")
    (tmp_path / "pip" / "__main__.py").rename(tmp_path / "uv").chmod(0o755)
    assert (packages.find_compiler("cuda") / "plugin.py").exists()
    assert (tmp_path / "log").read_text().startswith(f"pip install --python {sys.executable} ")


def test_directories_differ(base, monkeypatch):
    cuda, tpu = map(packages.compiler_directory, packages.COMPILERS)
    assert cuda.parent == tpu.parent == base and cuda != tpu
    assert f"jaxlib{jax.lib.__version__}-cp{sys.version_info.major}" in cuda.name
    monkeypatch.delenv(packages.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    assert packages.compiler_directory("tpu") == base / "effjax" / "compilers" / tpu.name


def test_killed_installation_is_repeated(base):
    folder = packages.compiler_directory("cuda")
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(parents=True)
    (partial / "half.so").touch()
    assert [path.name for path in packages.find_compiler("cuda").iterdir()] == ["plugin.py"]


def test_waits_for_another_process(base, capsys):
    folder = packages.compiler_directory("cuda")
    base.mkdir()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); input()"
    command = [sys.executable, "-c", code, f"{folder}.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        thread = threading.Thread(target=packages.find_compiler, args=("cuda",))
        thread.start()
        while "waiting for another process" not in capsys.readouterr().err:
            time.sleep(0.01)
        assert not folder.exists()
        folder.mkdir()  # the other process has installed it
        other.communicate(b"\n")
        thread.join()
    assert list(folder.iterdir()) == []


def test_no_network(base, tmp_path):
    (tmp_path / "pip" / "__main__.py").write_text(
        "import sys; sys.exit('WARNING: retrying\\nERROR: No matching distribution found')"
    )
    with pytest.raises(PlanError, match=r"\(ERROR: No matching .*--install-compiler cuda"):
        plan(jnp.sin, X)
    assert [path.suffix for path in base.iterdir()] == [".lock"]


def test_directory_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv(packages.DIRECTORY_VARIABLE, "/dev/null/compilers")
    with pytest.raises(PlanError, match="/dev/null/compilers"):
        plan(jnp.sin, X)


@pytest.mark.parametrize(
    ("target", "system", "machine"), [("h200", "darwin", "arm64"), ("v5e", "linux", "aarch64")]
)
def test_other_systems(base, monkeypatch, target, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(PlanError, match=rf"{system} \({machine}\)"):
        plan(jnp.sin, X, target=target)


@needs_gpu_compiler
def test_compiler_is_not_importable():
    folder = packages.find_compiler("cuda")
    assert (folder / "jax_plugins").is_dir()
    assert not any(Path(path).is_relative_to(folder) for path in sys.path)
    files = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
    assert not any(file.startswith(str(folder)) for file in files)
    assert str(folder) not in os.environ.get("PYTHONPATH", "")


@pytest.mark.exhaustive
def test_damaged_folder_is_named(base):
    folder = packages.compiler_directory("cuda")
    folder.mkdir(parents=True)
    with pytest.raises(PlanError, match="is damaged .*Remove this folder") as error:
        plan(jnp.sin, X)
    assert str(folder) in str(error.value)
