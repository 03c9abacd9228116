"""Recording of PyTorch's results and checkpoints.

`python -m tests.convert.record` writes them to `recorded/`. The committed files were computed with
torchvision's networks and its deformable convolution.
"""

from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from tests.convert import torch_networks
from tests.convert.cases import RECORDED, random_array, save
from tests.convert.torch_detection import Detector, ResNet


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


class Pack(nn.Module):
    """Copy of mmcv's `DeformConv2dPack` and `ModulatedDeformConv2dPack`."""

    offset_name, masked = "conv_offset", False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 1, 3, 3))
        if self.masked:
            self.bias = nn.Parameter(torch.empty(4))
        channels = 2 * 9 * (3 if self.masked else 2)  # two groups of offsets
        self.add_module(self.offset_name, nn.Conv2d(2, channels, 3, 2, 1))

    def forward(self, x):
        predicted = getattr(self, self.offset_name)(x)
        mask = None
        if self.masked:
            first, second, mask = torch.chunk(predicted, 3, 1)
            predicted, mask = torch.cat((first, second), 1), torch.sigmoid(mask)
        return torch_networks.deform_conv2d(
            x, predicted, self.weight, getattr(self, "bias", None), 2, 1, 1, mask
        )


class ModulatedPack(Pack):
    masked = True


class BenchmarkPack(Pack):
    """Copy of maskrcnn-benchmark's modulated layer, which has another offset name."""

    offset_name, masked = "conv_offset_mask", True


class DFConv2d(nn.Module):
    """Copy of maskrcnn-benchmark's modulated `DFConv2d`."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Conv2d(2, 27, 3, 1, 1)
        self.conv = nn.Conv2d(2, 4, 3, 1, 1, bias=False)

    def forward(self, x):
        offset, mask = self.offset(x).split([18, 9], 1)
        return torch_networks.deform_conv2d(
            x, offset, self.conv.weight, None, 1, 1, 1, torch.sigmoid(mask)
        )


def densenet(growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2, num_classes=3):
    return torch_networks.DenseNet(
        growth_rate, block_config, num_init_features, bn_size, num_classes
    )


CASES = {
    "resnet": lambda: run(ResNet(False, (1, 1), 3, width=2), (3, 19, 14, 3)),
    "detector": lambda: run(Detector(), (2, 21, 18, 3)),
    "densenet": lambda: run(densenet(), (4, 8, 8, 3)),
    "batch_norm": lambda: run(nn.BatchNorm2d(5), (4, 3, 3, 5)),
    "cumulative_batch_norm": lambda: run(nn.BatchNorm2d(5, momentum=None), (4, 3, 3, 5), 3),
    "pack": lambda: run(Pack(), (2, 7, 6, 2)),
    "modulated_pack": lambda: run(ModulatedPack(), (2, 7, 6, 2)),
    "benchmark_pack": lambda: run(BenchmarkPack(), (2, 7, 6, 2)),
    "dfconv": lambda: run(DFConv2d(), (2, 5, 5, 2)),
}


def checkpoint():
    """Return views, a parameter, and tensors of all dtypes."""
    a = torch.arange(24.0).reshape(4, 6)
    kinds = {str(kind).removeprefix("torch."): torch.arange(4).to(kind) for kind in KINDS}
    views = {"whole": a, "transposed": a.T, "part": a[1:3, 2:], "column": a[:, 1], "empty": a[:0]}
    return {
        "epoch": 3,
        "state_dict": OrderedDict(
            **views, **kinds, parameter=nn.Parameter(a[0]), scalar=torch.tensor(7)
        ),
    }


KINDS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
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
