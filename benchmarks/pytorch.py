"""PyTorch as a peer: whether it can be imported, and a dense block in it.

The checkpointed block is that of the original: concatenation, batch norm, ReLU and 1x1 convolution
of each layer run under ``torch.utils.checkpoint``, so that the wide arrays are recomputed in the
backward pass.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .results import num_threads

PLAIN, EFFICIENT = "PyTorch", "PyTorch, checkpointed bottlenecks"


@functools.cache
def missing(name: str) -> str:
    """Return why a package cannot be imported, or an empty string.

    Gives PyTorch as many threads as XLA has.
    """
    if importlib.util.find_spec(name) is None:
        return f"Without {name}: it is not installed (pip install torch torchvision)."
    try:
        importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(num_threads())
    except Exception as error:  # builds that do not match each other or lack a GPU's libraries
        first = (str(error) or "no message").splitlines()[0]
        return f"Without {name}: importing it failed ({type(error).__name__}: {first})."
    return ""


def to_nchw(a: Any) -> Any:
    """Return a tensor [N, C, H, W] of an array [N, H, W, C]."""
    torch: Any = importlib.import_module("torch")
    return torch.tensor(np.asarray(a).transpose(0, 3, 1, 2)).contiguous()


def to_nhwc(t: Any) -> np.ndarray:
    """Return an array [N, H, W, C] of a tensor [N, C, H, W]."""
    return t.detach().permute(0, 2, 3, 1).numpy()


def _dense_block(
    x: Any, layers: Sequence[dict[str, Any]], efficient: bool
) -> tuple[Any, list[Any]]:
    """Return the block's features as one tensor and one by one."""
    torch: Any = importlib.import_module("torch")
    checkpoint: Any = importlib.import_module("torch.utils.checkpoint").checkpoint
    norm, conv = torch.nn.functional.batch_norm, torch.nn.functional.conv2d

    def bottleneck(p: dict[str, Any], *features: Any) -> Any:
        x = torch.cat(features, 1)
        x = norm(x, None, None, p["scale1"], p["bias1"], training=True, eps=1e-5).relu()
        return conv(x, p["kernel1"])

    features = [x]
    for p in layers:
        if efficient:
            z = checkpoint(bottleneck, p, *features, use_reentrant=False)
        else:
            z = bottleneck(p, *features)
        z = norm(z, None, None, p["scale2"], p["bias2"], training=True, eps=1e-5).relu()
        features.append(conv(z, p["kernel2"], padding=1))
    return torch.cat(features, 1), features


def block_steps(params: Sequence[Any], x: Any, weights: Any) -> dict[str, Callable[[], Any]]:
    """Return functions of the loss and gradients of a dense block, in effjax's layout."""
    torch: Any = importlib.import_module("torch")

    def to_tensor(a: Any) -> Any:
        a = np.asarray(a)
        return torch.tensor(a.transpose(3, 2, 0, 1).copy() if a.ndim == 4 else a.copy())

    def to_array(t: Any) -> Any:
        return t.permute(2, 3, 1, 0).numpy() if t.ndim == 4 else t.numpy()

    layers = [{k: to_tensor(v).requires_grad_() for k, v in p._asdict().items()} for p in params]
    image, loss_weights = to_nchw(x).requires_grad_(), to_nchw(weights)

    def step(efficient: bool) -> Any:
        for t in (image, *(t for p in layers for t in p.values())):
            t.grad = None
        loss = (_dense_block(image, layers, efficient)[0] * loss_weights).sum()
        loss.backward()
        grads = [
            type(p)(**{k: to_array(t.grad) for k, t in layer.items()})
            for p, layer in zip(params, layers, strict=True)
        ]
        return loss.detach().numpy(), (grads, to_nhwc(image.grad))

    return {PLAIN: lambda: step(False), EFFICIENT: lambda: step(True)}
