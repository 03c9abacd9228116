"""torchvision's ResNets in linen, with the names of `convert.RESNET`."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import linen as nn

DEPTHS = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
}
NORM = dict(use_running_average=True, epsilon=1e-5)


def conv(features, size, strides=1):
    return nn.Conv(features, (size, size), strides, padding=size // 2, use_bias=False)


class Block(nn.Module):
    bottleneck: bool
    width: int
    strides: int
    shortcuts: bool

    def setup(self):
        wide = self.width * (4 if self.bottleneck else 1)
        strides = 1, self.strides
        if self.bottleneck:
            self.conv1, self.conv2 = conv(self.width, 1), conv(self.width, 3, self.strides)
            self.conv3, self.norm3 = conv(wide, 1), nn.BatchNorm(**NORM)
        else:
            self.conv1, self.conv2 = conv(self.width, 3, self.strides), conv(wide, 3)
        self.norm1, self.norm2 = nn.BatchNorm(**NORM), nn.BatchNorm(**NORM)
        if self.shortcuts:
            self.shortcut, self.shortcut_norm = conv(wide, 1, strides[1]), nn.BatchNorm(**NORM)

    def __call__(self, x):
        shortcut = self.shortcut_norm(self.shortcut(x)) if self.shortcuts else x
        x = self.norm2(self.conv2(nn.relu(self.norm1(self.conv1(x)))))
        if self.bottleneck:
            x = self.norm3(self.conv3(nn.relu(x)))
        return nn.relu(x + shortcut)


class ResNet(nn.Module):
    bottleneck: bool
    layers: Sequence[int]
    num_classes: int = 1000

    def setup(self):
        self.stem_conv = nn.Conv(64, (7, 7), 2, padding=3, use_bias=False)
        self.stem_norm = nn.BatchNorm(**NORM)
        self.stages = [
            [
                Block(
                    self.bottleneck, 64 << stage, 2 if stage and not i else 1,
                    not i and (stage > 0 or self.bottleneck),
                )
                for i in range(count)
            ]
            for stage, count in enumerate(self.layers)
        ]  # fmt: skip
        self.classifier = nn.Dense(self.num_classes)

    def __call__(self, x):
        x = nn.relu(self.stem_norm(self.stem_conv(x)))
        x = nn.max_pool(jnp.asarray(x), (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.classifier(x.mean((1, 2)))
