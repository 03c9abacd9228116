"""PyTorch beside effjax: whether it can be imported, and the dense block in it.

The block's efficient form is that of the original: concatenation, batch norm, ReLU and 1x1
convolution of each layer under ``torch.utils.checkpoint``, so that the wide arrays are made again
in the backward pass.
"""

import functools
import importlib
import importlib.util
import itertools
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


def densenet_steps(
    depth: int, batch_size: int, image_size: int, growth_rate: int = 12
) -> dict[str, Callable[[], float]]:
    """Training steps of a DenseNet-BC for ten classes, which return the loss. Its weights are
    drawn by PyTorch, so that only the time can be compared."""
    torch: Any = importlib.import_module("torch")
    ops, parameters = torch.nn.functional, []
    torch.manual_seed(0)

    def made(a: Any) -> Any:
        parameters.append(a.requires_grad_())
        return a

    def kernel(out: int, channels: int, size: int) -> Any:
        scale = (2 / (channels * size * size)) ** 0.5
        return made(scale * torch.randn(out, channels, size, size))

    def affine(channels: int) -> tuple[Any, Any]:
        return made(torch.ones(channels)), made(torch.zeros(channels))

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        return ops.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5).relu()

    channels, wide, blocks, transitions = 2 * growth_rate, 4 * growth_rate, [], []
    stem = kernel(channels, 3, 3)
    for stage in range(3):
        layers = []
        for _ in range((depth - 4) // 6):
            p = {"kernel1": kernel(wide, channels, 1), "kernel2": kernel(growth_rate, wide, 3)}
            p["scale1"], p["bias1"] = affine(channels)
            p["scale2"], p["bias2"] = affine(wide)
            layers.append(p)
            channels += growth_rate
        blocks.append(layers)
        if stage < 2:
            transitions.append((affine(channels), kernel(channels // 2, channels, 1)))
            channels //= 2
    last, classes = affine(channels), made(0.01 * torch.randn(channels, 10))
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = torch.randint(0, 10, (batch_size,))
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)

    def step(efficient: bool) -> float:
        x = ops.conv2d(images, stem, padding=1)
        for layers, after in itertools.zip_longest(blocks, transitions):
            x, _ = block(x, layers, efficient)
            if after is not None:
                x = ops.avg_pool2d(ops.conv2d(norm(x, *after[0]), after[1]), 2)
        loss = ops.cross_entropy(norm(x, *last).mean((2, 3)) @ classes, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

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
