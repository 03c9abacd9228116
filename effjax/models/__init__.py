"""Whole networks: those of NNX, by class and by name. Those of linen are in `models.linen`."""

from .densenet import DENSENETS as DENSENETS
from .densenet import cifar_options as cifar_options
from .densenet import densenet40_12 as densenet40_12
from .densenet import densenet100_12 as densenet100_12
from .densenet import densenet121 as densenet121
from .densenet import densenet161 as densenet161
from .densenet import densenet169 as densenet169
from .densenet import densenet201 as densenet201
from .densenet import densenet_cifar as densenet_cifar
from .nnx import DeformResNet as DeformResNet
from .nnx import DenseNet as DenseNet
from .nnx import FeaturePyramid as FeaturePyramid
from .nnx import ResNet as ResNet
from .nnx import TransformerBlock as TransformerBlock
from .nnx import TransformerLM as TransformerLM
from .nnx import scan_layers as scan_layers
from .resnet import RESNETS as RESNETS
from .resnet import resnet18 as resnet18
from .resnet import resnet34 as resnet34
from .resnet import resnet50 as resnet50
from .resnet import resnet101 as resnet101
