"""PyTorch beside effjax: whether it can be imported, and the dense block in it.

The block's efficient form is that of the original: concatenation, batch norm, ReLU and 1x1
convolution of each layer under ``torch.utils.checkpoint``, so that the wide arrays are made again
in the backward pass.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._measure import threads

PLAIN, EFFICIENT = "PyTorch", "PyTorch, checkpointed bottlenecks"


@functools.cache
def find(name: str) -> tuple[Any, str]:
    """A package, on as many threads as XLA has; or None, and why."""
    if importlib.util.find_spec(name) is None:
        return None, f"{name} is not installed (pip install torch torchvision)"
    try:
        found = importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(threads())
    except Exception as error:  # an operator that does not exist, a library of a GPU's
        first = (str(error) or "without a word").splitlines()[0]
        return None, f"{name} is installed and does not load ({type(error).__name__}: {first})"
    return found, ""


def block(features: Any, layers: Sequence[dict[str, Any]], efficient: bool) -> tuple[Any, list]:
    """The features of a dense block as one array, and one by one."""
    torch: Any = importlib.import_module("torch")
    checkpoint: Any = importlib.import_module("torch.utils.checkpoint").checkpoint
    norm, conv = torch.nn.functional.batch_norm, torch.nn.functional.conv2d

    def bottleneck(p: dict[str, Any], *features: Any) -> Any:
        x = torch.cat(features, 1)
        x = norm(x, None, None, p["scale1"], p["bias1"], training=True, eps=1e-5).relu()
        return conv(x, p["kernel1"])

    found = [features]
    for p in layers:
        if efficient:
            z = checkpoint(bottleneck, p, *found, use_reentrant=False)
        else:
            z = bottleneck(p, *found)
        z = norm(z, None, None, p["scale2"], p["bias2"], training=True, eps=1e-5).relu()
        found.append(conv(z, p["kernel2"], padding=1))
    return torch.cat(found, 1), found


def block_steps(params: Sequence[Any], x: Any, weights: Any) -> dict[str, Callable[[], Any]]:
    """Loss and gradients of both forms, in the layout of effjax's."""
    torch: Any = importlib.import_module("torch")
    nchw = lambda a: torch.tensor(np.asarray(a).transpose(0, 3, 1, 2)).contiguous()  # noqa: E731
    nhwc = lambda t: t.detach().permute(0, 2, 3, 1).numpy()  # noqa: E731

    def leaf(a: Any) -> Any:
        a = np.asarray(a)
        return torch.tensor(a.transpose(3, 2, 0, 1).copy() if a.ndim == 4 else a.copy())

    def back(t: Any) -> Any:
        return t.permute(2, 3, 1, 0).numpy() if t.ndim == 4 else t.numpy()

    leaves = [{k: leaf(v).requires_grad_() for k, v in p._asdict().items()} for p in params]
    image, of_loss = nchw(x).requires_grad_(), nchw(weights)

    def step(efficient: bool) -> Any:
        for t in (image, *(t for p in leaves for t in p.values())):
            t.grad = None
        loss = (block(image, leaves, efficient)[0] * of_loss).sum()
        loss.backward()
        grads = [
            type(own)(**{k: back(t.grad) for k, t in p.items()})
            for own, p in zip(params, leaves, strict=True)
        ]
        return loss.detach().numpy(), (grads, nhwc(image.grad))

    return {name: functools.partial(step, name == EFFICIENT) for name in (PLAIN, EFFICIENT)}


def block_kept_bytes(params: Sequence[Any], x: jax.ShapeDtypeStruct, efficient: bool) -> int:
    """What autograd keeps for the backward pass of the block, each storage once.

    Nothing is computed: the tensors are shapes.
    """
    torch: Any = importlib.import_module("torch")

    def leaf(a: Any) -> Any:
        shape = [a.shape[i] for i in (3, 2, 0, 1)] if len(a.shape) == 4 else a.shape
        return torch.empty(*shape, device="meta", requires_grad=True)

    layers = [{k: leaf(v) for k, v in p._asdict().items()} for p in params]
    n, h, w, c = x.shape
    image = torch.empty(n, c, h, w, device="meta", requires_grad=True)
    held: dict[int, Any] = {}  # by storage, which must live on to keep its name

    def keep(t: Any) -> Any:
        storage = t.untyped_storage()
        held[storage._cdata] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y, features = block(image, layers, efficient)
    if efficient:  # checkpoint holds the arguments of its functions
        for t in (*features[:-1], *(p[k] for p in layers for k in ("scale1", "bias1", "kernel1"))):
            keep(t)
    del y
    return sum(storage.nbytes() for storage in held.values())
