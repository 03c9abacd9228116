"""Models by name."""

from ..nnx.deform_resnet import DeformResNet as DeformResNet
from .densenet import DENSENETS as DENSENETS
from .densenet import cifar_options as cifar_options
from .densenet import densenet40_12 as densenet40_12
from .densenet import densenet100_12 as densenet100_12
from .densenet import densenet121 as densenet121
from .densenet import densenet161 as densenet161
from .densenet import densenet169 as densenet169
from .densenet import densenet201 as densenet201
from .densenet import densenet_cifar as densenet_cifar
