"""Recording of source lines of libraries in lowered programs.

Uses a private module of JAX (`source_info_util`). Tested with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jax._src import source_info_util

from ..read.source import is_in_library


@contextmanager
def record_library_lines() -> Iterator[None]:
    """Make JAX record the lines of all packages except its own in lowered programs.

    JAX drops frames below the standard library's folder. Outside of a virtual environment, that
    folder contains every installed package.
    """
    before = list(source_info_util._include_paths)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if "." not in name and not name.startswith("jax") and is_in_library(file):
            package = hasattr(module, "__path__")
            source_info_util.register_inclusion(os.path.dirname(file) + os.sep if package else file)
    try:
        yield
    finally:
        source_info_util._include_paths[:] = before
        source_info_util._include_path_regex.cache_clear()
        source_info_util.is_user_filename.cache_clear()
