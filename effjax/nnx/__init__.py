"""Flax NNX modules over the operators of effjax."""

from .batch_norm import BatchNorm as BatchNorm
from .convert import convert_batch_norm as convert_batch_norm
from .deform_conv import DeformConv as DeformConv
from .deform_conv import DeformConvPack as DeformConvPack
from .deform_conv import DFConv2d as DFConv2d
from .deform_conv import ModulatedDeformConv as ModulatedDeformConv
from .deform_conv import ModulatedDeformConvPack as ModulatedDeformConvPack
from .deform_resnet import DeformResNet as DeformResNet
from .densenet import DenseNet as DenseNet
from .offload import OffloadModel as OffloadModel
from .transformer import TransformerBlock as TransformerBlock
from .transformer import TransformerLM as TransformerLM
from .transformer import scan_layers as scan_layers
