"""Public names of the packages, and hints for names of PyTorch."""

from collections.abc import Mapping
from typing import Any

# Names of apex, PyTorch, torchvision and mmcv, and those in `effjax.nnx` and `effjax.linen`.
FLAX_NAMES = {
    "SyncBatchNorm": "BatchNorm",
    "convert_syncbn_model": "convert_batch_norm",
    "convert_sync_batchnorm": "convert_batch_norm",
    "DeformConv2d": "DeformConv",
    "ModulatedDeformConv2d": "DeformConv",
    "DeformConv2dPack": "DeformConv",
    "ModulatedDeformConv2dPack": "DeformConv",
}


def list_public(namespace: Mapping[str, Any]) -> list[str]:
    """Return the public names of a module that effjax defines, without its submodules."""
    return sorted(
        name
        for name, value in namespace.items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) or "").startswith("effjax.")
    )


def missing_name(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module lacks; it names the counterpart of PyTorch's."""
    hint = ""
    if ours := FLAX_NAMES.get(name):
        places = ("effjax.nnx", "effjax.linen") if module == "effjax" else (module,)
        hint = f". It is {' or '.join(f'{place}.{ours}' for place in places)} here"
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
