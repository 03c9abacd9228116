"""Copies of torchvision's networks, for machines that have PyTorch without torchvision."""

import torch
from torch import nn
from torch.nn import functional as F


def conv(channels, features, size, stride=1, groups=1):
    return nn.Conv2d(channels, features, size, stride, size // 2, groups=groups, bias=False)


class DenseLayer(nn.Module):
    def __init__(self, channels, growth_rate, bn_size):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), conv(channels, bn_size * growth_rate, 1)
        self.norm2 = nn.BatchNorm2d(bn_size * growth_rate)
        self.conv2 = conv(bn_size * growth_rate, growth_rate, 3)

    def forward(self, x):
        return self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


class DenseBlock(nn.ModuleDict):
    def forward(self, x):
        for layer in self.values():
            x = torch.cat((x, layer(x)), 1)
        return x


class Transition(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), conv(channels, channels // 2, 1)

    def forward(self, x):
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2)


class DenseNet(nn.Module):
    def __init__(
        self, growth_rate=32, block_config=(6, 12, 24, 16), num_init_features=64, bn_size=4,
        num_classes=1000,
    ):  # fmt: skip
        super().__init__()
        channels = num_init_features
        parts = {
            "conv0": nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            "norm0": nn.BatchNorm2d(channels),
            "relu0": nn.ReLU(),
            "pool0": nn.MaxPool2d(3, 2, 1),
        }
        for i, count in enumerate(block_config, 1):
            block = DenseBlock()
            for j in range(1, count + 1):
                block[f"denselayer{j}"] = DenseLayer(channels, growth_rate, bn_size)
                channels += growth_rate
            parts[f"denseblock{i}"] = block
            if i < len(block_config):
                parts[f"transition{i}"] = Transition(channels)
                channels //= 2
        parts["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential()
        for name, part in parts.items():
            self.features.add_module(name, part)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.classifier(F.relu(self.features(x)).mean((2, 3)))


DENSENETS = {
    "densenet121": {},
    "densenet161": dict(growth_rate=48, block_config=(6, 12, 36, 24), num_init_features=96),
    "densenet169": dict(block_config=(6, 12, 32, 32)),
    "densenet201": dict(block_config=(6, 12, 48, 32)),
}


class ResidualBlock(nn.Module):
    def __init__(self, bottleneck, channels, planes, stride, groups, width_per_group):
        super().__init__()
        features = planes * (4 if bottleneck else 1)
        shapes = [(channels, planes, 3, 1), (planes, features, 3, 1)]
        if bottleneck:
            width = planes * width_per_group // 64 * groups
            shapes = [(channels, width, 1, 1), (width, width, 3, groups), (width, features, 1, 1)]
        self.count = len(shapes)
        for k, (into, out, size, groups) in enumerate(shapes, 1):
            strided = k == (2 if bottleneck else 1)
            setattr(self, f"conv{k}", conv(into, out, size, stride if strided else 1, groups))
            setattr(self, f"bn{k}", nn.BatchNorm2d(out))
        self.downsample = None
        if stride > 1 or channels != features:
            self.downsample = nn.Sequential(
                conv(channels, features, 1, stride), nn.BatchNorm2d(features)
            )

    def forward(self, x):
        y = x
        for k in range(1, self.count + 1):
            y = getattr(self, f"bn{k}")(getattr(self, f"conv{k}")(y))
            y = F.relu(y) if k < self.count else y
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, bottleneck, layers, groups=1, width_per_group=64, num_classes=1000):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        channels = 64
        for stage, count in enumerate(layers):
            planes, blocks = 64 << stage, []
            for i in range(count):
                stride = 2 if stage and not i else 1
                options = stride, groups, width_per_group
                blocks.append(ResidualBlock(bottleneck, channels, planes, *options))
                channels = planes * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


RESNETS = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
    "resnet152": (True, (3, 8, 36, 3)),
    "wide_resnet50_2": (True, (3, 4, 6, 3), 1, 128),
    "wide_resnet101_2": (True, (3, 4, 23, 3), 1, 128),
    "resnext50_32x4d": (True, (3, 4, 6, 3), 32, 4),
    "resnext101_32x8d": (True, (3, 4, 23, 3), 32, 8),
    "resnext101_64x4d": (True, (3, 4, 23, 3), 64, 4),
}


def deform_conv2d(x, offset, weight, bias=None, stride=1, padding=0, dilation=1, mask=None):
    """Compute torchvision's `deform_conv2d` for square windows."""
    n, c, height, width = x.shape
    out, per_group, size, _ = weight.shape
    taps, (rows, columns) = size * size, offset.shape[2:]
    groups = offset.shape[1] // (2 * taps)
    at = offset.reshape(n, groups, taps, 2, rows, columns)
    tap, row, column = (torch.arange(k, dtype=x.dtype) for k in (taps, rows, columns))
    y = (tap // size * dilation - padding)[:, None, None] + (row * stride)[:, None] + at[:, :, :, 0]
    x_at = (tap % size * dilation - padding)[:, None, None] + column * stride + at[:, :, :, 1]
    top, left = y.floor(), x_at.floor()
    pixels = x.reshape(n, groups, c // groups, height * width)
    value = x.new_zeros(n, groups, c // groups, taps * rows * columns)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        valid = (top + i >= 0) & (top + i < height) & (left + j >= 0) & (left + j < width)
        weights = (y - top if i else 1 - y + top) * (x_at - left if j else 1 - x_at + left)
        index = ((top + i).clamp(0, height - 1) * width + (left + j).clamp(0, width - 1)).long()
        index = index.reshape(n, groups, 1, -1).expand(-1, -1, c // groups, -1)
        value = value + pixels.gather(3, index) * (weights * valid).reshape(n, groups, 1, -1)
    if mask is not None:
        value = value * mask.reshape(n, groups, 1, -1)
    value = value.reshape(n, c, taps, rows, columns)
    kernel = weight.reshape(c // per_group, out * per_group // c, per_group, taps)
    value = value.reshape(n, c // per_group, per_group, taps, rows, columns)
    result = torch.einsum("ngctyx,goct->ngoyx", value, kernel).reshape(n, out, rows, columns)
    return result if bias is None else result + bias[:, None, None]
