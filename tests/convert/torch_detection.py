"""Copies of a detector's backbone and pyramid, with the names of torchvision and mmdetection."""

import torch
from torch import nn
from torch.nn import functional as F

DEPTHS = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
}


def conv(channels, features, size, stride=1, bias=False):
    return nn.Conv2d(channels, features, size, stride, size // 2, bias=bias)


class Pack(nn.Module):
    """Copy of mmcv's 3x3 `ModulatedDeformConv2dPack`, computed tap by tap."""

    def __init__(self, channels, features, stride, groups):
        super().__init__()
        self.stride, self.groups = stride, groups
        self.weight = nn.Parameter(torch.empty(features, channels, 3, 3))
        self.conv_offset = conv(channels, groups * 27, 3, stride, bias=True)

    def forward(self, x):
        n, c, h, w = x.shape
        predicted = self.conv_offset(x)
        rows, columns = predicted.shape[2:]
        offset, mask = predicted.split([self.groups * 18, self.groups * 9], 1)
        offset = offset.reshape(n * self.groups, 9, 2, rows, columns)
        mask = mask.sigmoid().reshape(n * self.groups, 9, 1, rows, columns)
        x = x.reshape(n * self.groups, c // self.groups, h, w)
        top, left = torch.meshgrid(
            torch.arange(rows) * self.stride - 1, torch.arange(columns) * self.stride - 1,
            indexing="ij",
        )  # fmt: skip
        y = 0
        for tap in range(9):
            places = (
                (left + tap % 3 + offset[:, tap, 1]) * 2 / (w - 1) - 1,
                (top + tap // 3 + offset[:, tap, 0]) * 2 / (h - 1) - 1,
            )
            read = F.grid_sample(x, torch.stack(places, -1), align_corners=True) * mask[:, tap]
            read = read.reshape(n, c, rows, columns)
            y = y + torch.einsum("nchw,oc->nohw", read, self.weight[:, :, tap // 3, tap % 3])
        return y


class Block(nn.Module):
    def __init__(self, bottleneck, channels, width, stride, dcn_groups=0):
        super().__init__()
        features = width * (4 if bottleneck else 1)
        if bottleneck:
            self.conv1, first = conv(channels, width, 1), width
            self.conv2 = conv(width, width, 3, stride)
            self.conv3, self.bn3 = conv(width, features, 1), nn.BatchNorm2d(features)
        else:
            self.conv1, first = conv(channels, width, 3, stride), width
            self.conv2 = conv(width, width, 3)
        if dcn_groups:
            self.conv2 = Pack(width, width, stride if bottleneck else 1, dcn_groups)
        self.bn1, self.bn2 = nn.BatchNorm2d(first), nn.BatchNorm2d(width)
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

    def __init__(self, bottleneck, sizes, num_classes=None, width=64, dcn=(), dcn_groups=1):
        super().__init__()
        self.conv1, self.bn1 = conv(3, width, 7, 2), nn.BatchNorm2d(width)
        self.sizes, channels = sizes, width
        for stage, size in enumerate(sizes):
            groups = dcn_groups if dcn and dcn[stage] else 0
            blocks = []
            for i in range(size):
                stride = 2 if stage and not i else 1
                blocks.append(Block(bottleneck, channels, width << stage, stride, groups))
                channels = (width << stage) * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = None if num_classes is None else nn.Linear(channels, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        found = []
        for stage in range(len(self.sizes)):
            x = getattr(self, f"layer{stage + 1}")(x)
            found.append(x)
        return found if self.fc is None else self.fc(x.mean((2, 3)))


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
        self.backbone = ResNet(True, (1, 1), width=2, dcn=(False, True), dcn_groups=2)
        self.neck = Pyramid((8, 16), 3)

    def forward(self, x):
        levels = self.neck(self.backbone(x))
        return torch.cat([level.permute(0, 2, 3, 1).flatten(1) for level in levels], 1)
