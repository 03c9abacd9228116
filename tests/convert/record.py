"""Recording of PyTorch's results and checkpoints.

`python -m tests.convert.record` writes them to `recorded/`. The committed files were computed with
torchvision's networks and its deformable convolution.
"""

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from tests.convert.cases import RECORDED, random_array, save
from tests.convert.torch_networks import DenseNet, Detector, DFConv2d, Pack, ResNet


def run(module, shape, steps=1):
    """Return a case: training steps on one batch, of which the last is recorded."""
    module = module.double().train()
    weights = {
        name: random_array(f"weights/{name}", a.shape) for name, a in module.state_dict().items()
    }
    module.load_state_dict({name: torch.as_tensor(a) for name, a in weights.items()})
    x = torch.from_numpy(first(random_array("x", shape))).requires_grad_()
    for _ in range(steps):
        y = module(x)
    dy = random_array("dy", last(y).shape)
    y.backward(torch.from_numpy(first(dy)))
    after = {name: a.numpy() for name, a in module.state_dict().items() if "running" in name}
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    return {
        **{f"weights/{name}": array for name, array in weights.items()},
        **{f"gradients/{name}": array for name, array in gradients.items()},
        **{f"after/{name}": array.copy() for name, array in after.items()},
        "x": random_array("x", shape), "dy": dy, "y": last(y), "dx": last(x.grad),
        "evaluated": last(module.eval()(x)),
    }  # fmt: skip


def first(array):
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if array.ndim == 4 else array


def last(tensor):
    array = tensor.detach().numpy()
    return np.moveaxis(array, 1, -1) if array.ndim == 4 else array


CASES = {
    "resnet": lambda: run(ResNet(False, (1, 1), num_classes=3, width=2), (3, 19, 14, 3)),
    "detector": lambda: run(Detector(), (2, 21, 18, 3)),
    "densenet": lambda: run(DenseNet(2, (2, 1), 4, 2, 3), (4, 8, 8, 3)),
    "batch_norm": lambda: run(nn.BatchNorm2d(5), (4, 3, 3, 5)),
    "cumulative_batch_norm": lambda: run(nn.BatchNorm2d(5, momentum=None), (4, 3, 3, 5), 3),
    "pack": lambda: run(pack(masked=False), (2, 7, 6, 2)),
    "modulated_pack": lambda: run(pack(bias=True), (2, 7, 6, 2)),
    # That of maskrcnn-benchmark.
    "benchmark_pack": lambda: run(pack(bias=True, offset_name="conv_offset_mask"), (2, 7, 6, 2)),
    "dfconv": lambda: run(DFConv2d(), (2, 5, 5, 2)),
}


def pack(**options):
    return Pack(2, 4, 2, 2, groups=2, **options)


def checkpoint():
    """Return views, a parameter, and tensors of all dtypes."""
    a = torch.arange(24.0).reshape(4, 6)
    views = {"whole": a, "transposed": a.T, "part": a[1:3, 2:], "column": a[:, 1], "empty": a[:0]}
    kinds = {kind: torch.arange(4).to(getattr(torch, kind)) for kind in KINDS}
    others = {"parameter": nn.Parameter(a[0]), "scalar": torch.tensor(7)}
    return {"epoch": 3, "state_dict": OrderedDict(views | kinds | others)}


KINDS = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


def save_checkpoints(folder):
    """Save the checkpoint in both formats."""
    torch.save(checkpoint(), folder / "zip.pth")
    torch.save(checkpoint(), folder / "legacy.pth", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    save_checkpoints(RECORDED)
    for name, make in CASES.items():
        save(name, make())
