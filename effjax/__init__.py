"""effjax: train networks that do not fit in device memory, in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

from ._names import missing_name as _missing_name
from ._version import __version__ as __version__

_MODULES = (
    "compat",
    "convert",
    "linen",
    "memory",
    "models",
    "native",
    "nnx",
    "optimizers",
    "train",
)

if TYPE_CHECKING:
    from . import compat as compat
    from . import convert as convert
    from . import linen as linen
    from . import memory as memory
    from . import models as models
    from . import native as native
    from . import nnx as nnx
    from . import optimizers as optimizers
    from . import train as train
    from .ops import *  # noqa: F403
    from .ops import __all__ as __all__
else:
    # Import operators and modules at their first use: `effjax --help` does not import JAX, and
    # `import effjax` does not import Flax. Type checkers use the imports above.
    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__all__" or not name.startswith("_"):
            ops = importlib.import_module(f"{__name__}.ops")
            if name in ("__all__", *ops.__all__):
                return getattr(ops, name)
        raise _missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted(["__version__", *_MODULES, *__getattr__("__all__")])
