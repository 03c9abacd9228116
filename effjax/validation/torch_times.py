"""Times of torchvision's operators for the calls that the kernels are timed with."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .checks import median_seconds
from .kernels import KERNELS

NAMES = ("deform_conv2d", "roi_pool")  # the kernels that torchvision has operators for


def time_torchvision(kernel: str, dtype: str, platform: str, repeats: int = 15) -> float | None:
    """Return the median seconds of result and gradients, or None without torchvision."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torchvision  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    device = "cuda" if platform == "cuda" else "cpu"
    args = [np.asarray(a, np.float64) for a in KERNELS[kernel].timed("float32").args]

    def tensor(a: np.ndarray, order: tuple[int, ...] | None = None) -> Any:
        a = np.ascontiguousarray(a if order is None else a.transpose(order))
        # One dtype for all arguments, as the operators require.
        return torch.tensor(a, dtype=getattr(torch, dtype), device=device, requires_grad=True)

    channels_first = (0, 3, 1, 2)
    x = tensor(args[0], channels_first)
    call: Callable[[], Any]
    if kernel == "deform_conv2d":
        offset, mask = (tensor(a, channels_first) for a in (args[1], args[3]))
        weight = tensor(args[2], (3, 2, 0, 1))
        leaves = [x, offset, weight, mask]
        call = lambda: torchvision.ops.deform_conv2d(x, offset, weight, padding=1, mask=mask)  # noqa: E731
    else:
        boxes = [tensor(a).detach() for a in args[1]]
        leaves = [x]
        call = lambda: torchvision.ops.roi_align(  # noqa: E731
            x, boxes, output_size=7, sampling_ratio=2, aligned=True
        )
    dy = torch.ones_like(call())

    def run() -> None:
        torch.autograd.grad(call(), leaves, dy)
        if device == "cuda":
            torch.cuda.synchronize()

    return median_seconds(run, repeats=repeats)
