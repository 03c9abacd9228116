"""Installations of XLA's compilers for CUDA and TPU, which need neither a GPU nor a TPU.

JAX starts every plugin that it can import. Each compiler is therefore installed into a directory of
its own, which is on the search path of the planner's compiler process alone.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from ..._extras import install_command
from .lower import PlanError

Compiler = Literal["cuda", "tpu"]

COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
DIRECTORY_VARIABLE = "EFFJAX_COMPILERS"
_DOWNLOAD_MB = {"cuda": 250, "tpu": 214}
# XLA runs ptxas and nvlink and reads libdevice. The other 219 MB of the CUDA wheels are removed.
_UNUSED = ("nvidia/cu13/include", "nvidia/cu13/lib", "nvidia/cu13/nvvm/bin")
_USED_PROGRAMS = ("ptxas", "nvlink", "fatbinary")


def find_compiler(name: Compiler) -> Path:
    """Return the directory of a compiler; download it first if it is missing.

    Raises:
        PlanError: if the compiler is missing and cannot be installed.
    """
    folder = compiler_directory(name)
    return folder if folder.is_dir() else install_compiler(name)


def compiler_directory(name: Compiler) -> Path:
    """Return the directory of the compiler for the installed jaxlib, Python and processor.

    It lies in the directory that the environment variable EFFJAX_COMPILERS names, or else in the
    user's cache directory.
    """
    base = os.environ.get(DIRECTORY_VARIABLE)
    if not base:
        try:
            import platformdirs
        except ModuleNotFoundError as error:
            raise PlanError(
                f"the planner needs platformdirs. Run {install_command('plan')}."
            ) from error
        base = platformdirs.user_cache_path("effjax") / "compilers"
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return Path(base) / f"{name}-jaxlib{_jaxlib_version()}-{python}-{platform.machine()}"


def install_compiler(name: Compiler) -> Path:
    """Install a compiler, unless it is installed, and return its directory.

    Only one process installs at a time. A directory with the final name is complete.

    Raises:
        PlanError: if the compiler does not exist for this machine or cannot be downloaded.
    """
    folder = compiler_directory(name)
    if folder.is_dir():
        return folder
    command = [*_installer(), *_requirements(name)]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                _install(name, command, folder)
    except OSError as error:
        raise PlanError(
            f"the compiler for {name.upper()} is not installed, and {folder.parent} cannot be "
            f"written ({error.strerror}). {_remedy(name)}"
        ) from error
    return folder


def _install(name: Compiler, command: list[str], folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an installation that was killed
    start = time.perf_counter()
    _report(
        f"installing the compiler for {name.upper()} and jaxlib {_jaxlib_version()} into "
        f"{folder.parent} (once; a download of {_DOWNLOAD_MB[name]} MB) …"
    )
    # Settings of pip for other installations could conflict with --target.
    env = os.environ | {"PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    try:
        done = subprocess.run(
            [*command, "--target", str(partial)],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.strip()]
            reason = next((e for e in errors if e.startswith("ERROR")), (errors or ["?"])[-1])
            raise PlanError(
                f"the compiler for {name.upper()} is not installed and cannot be downloaded "
                f"({reason.strip()}). {_remedy(name)}"
            )
        _remove_unused(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _report(f"installed in {time.perf_counter() - start:.0f} s")


def _requirements(name: Compiler) -> list[str]:
    """Return the packages of a compiler, pinned to the installed jax."""
    machine = platform.machine()
    if sys.platform != "linux" or (name == "tpu" and machine != "x86_64"):
        raise PlanError(
            f"there is no compiler for {name.upper()} on {sys.platform} ({machine}): it needs Linux"
            f"{' on x86_64' if name == 'tpu' else ''}."
        )
    if name == "tpu":
        for requirement in importlib.metadata.requires("jax") or ():
            if found := re.match(r"(libtpu[^;]*);.*\bextra == [\"']tpu[\"']", requirement):
                return [found[1].strip()]
        raise PlanError("the installed jax does not name a version of libtpu")
    version = _jaxlib_version()
    plugin = [f"jax-cuda13-pjrt=={version}", f"jax-cuda13-plugin=={version}"]
    return [*plugin, "nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14"]


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _installer() -> list[str]:
    """Return the command that installs packages without their dependencies."""
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        return [*pip, "--no-deps", "--only-binary", ":all:"]
    if uv := shutil.which("uv"):  # environments made by uv have no pip
        python = ["--python", sys.executable]
        return [uv, "pip", "install", *python, "--no-deps", "--only-binary", ":all:"]
    raise PlanError(f"compilers are installed with pip or uv, and neither is in {sys.prefix}.")


def _remove_unused(folder: Path) -> None:
    for path in _UNUSED:
        shutil.rmtree(folder / path, ignore_errors=True)
    for path in (folder / "nvidia/cu13/bin").glob("*"):
        if path.name not in _USED_PROGRAMS:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock; the system releases locks of dead processes."""
    import fcntl

    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _report(f"waiting for another process that installs into {path.parent} …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remedy(name: Compiler) -> str:
    return (
        f"Run `effjax memory --install-compiler {name}` where there is a network, or set "
        f"{DIRECTORY_VARIABLE} to a directory into which that command has installed it."
    )


def _report(line: str) -> None:
    print(f"effjax: {line}", file=sys.stderr, flush=True)
