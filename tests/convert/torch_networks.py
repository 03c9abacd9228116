"""Copies of PyTorch's networks, for machines without torchvision, mmcv and mmdetection."""

import functools

import torch
from torch import nn
from torch.nn import functional as F


def conv(channels, features, size, stride=1, groups=1, bias=False):
    return nn.Conv2d(channels, features, size, stride, size // 2, groups=groups, bias=bias)


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
        parts = {"conv0": conv(3, channels, 7, 2), "norm0": nn.BatchNorm2d(channels)}
        parts |= {"relu0": nn.ReLU(), "pool0": nn.MaxPool2d(3, 2, 1)}
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


def deform_conv2d(x, offset, weight, bias, stride, mask):
    """Compute torchvision's `deform_conv2d` for windows of 3x3 and a padding of 1."""
    n, c, height, width = x.shape
    out, per_group, rows, columns = *weight.shape[:2], *offset.shape[2:]
    groups = offset.shape[1] // 18
    at = offset.reshape(n, groups, 9, 2, rows, columns)
    tap, row, column = (torch.arange(k, dtype=x.dtype) for k in (9, rows, columns))
    y = (tap // 3 - 1)[:, None, None] + (row * stride)[:, None] + at[:, :, :, 0]
    x_at = (tap % 3 - 1)[:, None, None] + column * stride + at[:, :, :, 1]
    top, left = y.floor(), x_at.floor()
    pixels = x.reshape(n, groups, c // groups, height * width)
    value = x.new_zeros(n, groups, c // groups, 9 * rows * columns)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        valid = (top + i >= 0) & (top + i < height) & (left + j >= 0) & (left + j < width)
        weights = (y - top if i else 1 - y + top) * (x_at - left if j else 1 - x_at + left)
        index = ((top + i).clamp(0, height - 1) * width + (left + j).clamp(0, width - 1)).long()
        index = index.reshape(n, groups, 1, -1).expand(-1, -1, c // groups, -1)
        value = value + pixels.gather(3, index) * (weights * valid).reshape(n, groups, 1, -1)
    if mask is not None:
        value = value * mask.reshape(n, groups, 1, -1)
    kernel = weight.reshape(c // per_group, out * per_group // c, per_group, 9)
    value = value.reshape(n, c // per_group, per_group, 9, rows, columns)
    result = torch.einsum("ngctyx,goct->ngoyx", value, kernel).reshape(n, out, rows, columns)
    return result if bias is None else result + bias[:, None, None]


class Pack(nn.Module):
    """Copy of mmcv's `ModulatedDeformConv2dPack`, or of `DeformConv2dPack` unless `masked`."""

    def __init__(
        self, channels, features, stride, offset_groups, groups=1, bias=False, masked=True,
        offset_name="conv_offset",
    ):  # fmt: skip
        super().__init__()
        self.stride, self.offset_name = stride, offset_name
        self.sizes = [18 * offset_groups, 9 * offset_groups * masked]
        self.weight = nn.Parameter(torch.empty(features, channels // groups, 3, 3))
        self.bias = nn.Parameter(torch.empty(features)) if bias else None
        self.add_module(offset_name, conv(channels, sum(self.sizes), 3, stride, bias=True))

    def forward(self, x):
        offset, mask = getattr(self, self.offset_name)(x).split(self.sizes, 1)
        mask = torch.sigmoid(mask) if self.sizes[1] else None
        return deform_conv2d(x, offset, self.weight, self.bias, self.stride, mask)


class DFConv2d(nn.Module):
    """Copy of maskrcnn-benchmark's modulated `DFConv2d`."""

    def __init__(self):
        super().__init__()
        self.offset, self.conv = conv(2, 27, 3, bias=True), conv(2, 4, 3)

    def forward(self, x):
        offset, mask = self.offset(x).split([18, 9], 1)
        return deform_conv2d(x, offset, self.conv.weight, None, 1, torch.sigmoid(mask))


class Block(nn.Module):
    """Residual block, whose second convolution is deformable with `dcn_groups`."""

    def __init__(self, bottleneck, channels, planes, stride, groups, width_per_group, dcn_groups):
        super().__init__()
        features, width = planes * (4 if bottleneck else 1), planes * width_per_group // 64 * groups
        if bottleneck:
            self.conv1 = conv(channels, width, 1)
            self.conv2 = conv(width, width, 3, stride, groups)
            self.conv3, self.bn3 = conv(width, features, 1), nn.BatchNorm2d(features)
        else:
            self.conv1, self.conv2 = conv(channels, width, 3, stride), conv(width, width, 3)
        if dcn_groups:
            self.conv2 = Pack(width, width, stride if bottleneck else 1, dcn_groups)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or channels != features:
            self.downsample = nn.Sequential(
                conv(channels, features, 1, stride), nn.BatchNorm2d(features)
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if hasattr(self, "conv3"):
            x = self.bn3(self.conv3(F.relu(x)))
        return F.relu(x + shortcut)


class ResNet(nn.Module):
    """ResNet that returns logits, or the outputs of all stages if `num_classes` is None."""

    def __init__(
        self, bottleneck, sizes, groups=1, width_per_group=64, num_classes=1000, width=64,
        dcn_groups=(0, 0, 0, 0),
    ):  # fmt: skip
        super().__init__()
        self.conv1, self.bn1 = conv(3, width, 7, 2), nn.BatchNorm2d(width)
        self.sizes, channels = sizes, width
        for stage, (size, of_dcn) in enumerate(zip(sizes, dcn_groups, strict=False)):
            blocks, planes = [], width << stage
            for i in range(size):
                options = 2 if stage and not i else 1, groups, width_per_group, of_dcn
                blocks.append(Block(bottleneck, channels, planes, *options))
                channels = planes * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = None if num_classes is None else nn.Linear(channels, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        found = []
        for stage in range(len(self.sizes)):
            x = getattr(self, f"layer{stage + 1}")(x)
            found.append(x)
        return found if self.fc is None else self.fc(x.mean((2, 3)))


# The networks of torchvision.
NETWORKS = {
    "densenet121": DenseNet,
    "densenet161": functools.partial(DenseNet, 48, (6, 12, 36, 24), 96),
    "densenet169": functools.partial(DenseNet, block_config=(6, 12, 32, 32)),
    "densenet201": functools.partial(DenseNet, block_config=(6, 12, 48, 32)),
    "resnet18": functools.partial(ResNet, False, (2, 2, 2, 2)),
    "resnet34": functools.partial(ResNet, False, (3, 4, 6, 3)),
    "resnet50": functools.partial(ResNet, True, (3, 4, 6, 3)),
    "resnet101": functools.partial(ResNet, True, (3, 4, 23, 3)),
    "resnet152": functools.partial(ResNet, True, (3, 8, 36, 3)),
    "wide_resnet50_2": functools.partial(ResNet, True, (3, 4, 6, 3), 1, 128),
    "wide_resnet101_2": functools.partial(ResNet, True, (3, 4, 23, 3), 1, 128),
    "resnext50_32x4d": functools.partial(ResNet, True, (3, 4, 6, 3), 32, 4),
    "resnext101_32x8d": functools.partial(ResNet, True, (3, 4, 23, 3), 32, 8),
    "resnext101_64x4d": functools.partial(ResNet, True, (3, 4, 23, 3), 64, 4),
}


class ConvModule(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.conv = conv(*args, bias=True)

    def forward(self, x):
        return self.conv(x)


class Pyramid(nn.Module):
    """Copy of mmdetection's FPN with two extra levels from convolutions."""

    def __init__(self, channels, features):
        super().__init__()
        self.lateral_convs = nn.ModuleList(ConvModule(c, features, 1) for c in channels)
        extras = ConvModule(channels[-1], features, 3, 2), ConvModule(features, features, 3, 2)
        self.fpn_convs = nn.ModuleList(
            [*(ConvModule(features, features, 3) for _ in channels), *extras]
        )

    def forward(self, levels):
        levels, last = list(levels), levels[-1]
        levels = [lateral(x) for lateral, x in zip(self.lateral_convs, levels, strict=True)]
        for i in range(len(levels) - 1, 0, -1):
            size = levels[i - 1].shape[2:]
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=size, mode="nearest")
        outputs, extras = self.fpn_convs[: len(levels)], self.fpn_convs[len(levels) :]
        found = [output(x) for output, x in zip(outputs, levels, strict=True)]
        for extra in extras:
            last = extra(last)
            found.append(last)
        return found


class Detector(nn.Module):
    """Pyramid of a ResNet-DCN that returns all levels as one vector per image, channels last."""

    def __init__(self):
        super().__init__()
        self.backbone = ResNet(True, (1, 1), num_classes=None, width=2, dcn_groups=(0, 2))
        self.neck = Pyramid((8, 16), 3)

    def forward(self, x):
        levels = self.neck(self.backbone(x))
        return torch.cat([level.permute(0, 2, 3, 1).flatten(1) for level in levels], 1)
