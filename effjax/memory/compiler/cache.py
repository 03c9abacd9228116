"""Compiled programs on disk, so that the same program is planned only once."""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..devices import Target
from .lower import LoweredProgram
from .packages import find_compiler
from .process import CompiledProgram, compile_for, effort_variables

_FORMAT = 3  # of the files, and of what the compiler is asked for
_MAX_FILES = 500
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # which the compilers read


def default_folder() -> Path:
    """Return the folder of cached programs of this user."""
    import platformdirs

    return platformdirs.user_cache_path("effjax") / "plans"


def compile_or_read(
    lowered: LoweredProgram,
    target: Target,
    options: Mapping[str, Any] | None,
    pipe: IO[bytes],
    folder: Path | None,
) -> CompiledProgram:
    """Compile a program as `compile_for` does, or read it from a folder, which stores it.

    A folder that cannot be written to caches nothing.
    """
    if folder is None:
        return compile_for(lowered, target, options, pipe)
    path = folder / f"{_digest(lowered, target, options)}.json.gz"
    program = _read(path)
    if program is None:
        program = compile_for(lowered, target, options, pipe)
        _write(path, program)
    return program


def _digest(lowered: LoweredProgram, target: Target, options: Mapping[str, Any] | None) -> str:
    # All that a compiler's result depends on. The text has no source locations, so a program that
    # moved in its file is found, with the lines that it had.
    module: Any = lowered.module.compiler_ir("stablehlo")
    compiler = find_compiler(target.platform)
    packages = importlib.metadata.distributions(path=[str(compiler)])
    settings = lowered.compiler_options | dict(options or {})
    key = {
        "format": _FORMAT,
        "program": module.operation.get_asm(enable_debug_info=False),
        "num_devices": lowered.num_devices,
        "target": [target.platform, target.name, target.config],
        "options": {name: str(value) for name, value in settings.items()},
        "flags": [os.environ.get(name, "") for name in _FLAG_VARIABLES],
        "effort": effort_variables(),
        "compiler": [compiler.name, sorted(f"{p.name} {p.version}" for p in packages)],
    }
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> CompiledProgram | None:
    """Return a stored program, or None if it is missing or damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            program = CompiledProgram(**json.load(file))
        with contextlib.suppress(OSError):  # of a read-only folder
            path.touch()  # the files used last are kept
        return program
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None


def _write(path: Path, program: CompiledProgram) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                file.write(gzip.compress(json.dumps(program._asdict()).encode(), compresslevel=3))
                file.close()
                os.replace(file.name, path)  # whole or not at all: others may read it
            except BaseException:
                os.unlink(file.name)
                raise
        files = sorted(path.parent.glob("*.json.gz"), key=lambda file: file.stat().st_mtime)
        for old in files[:-_MAX_FILES]:
            old.unlink()
