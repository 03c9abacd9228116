"""Networks for Flax NNX; `effjax.models.linen` has those for linen."""

from .._names import list_public as _list_public
from .decoder import decoder_functions as decoder_functions
from .decoder import decoder_logits as decoder_logits
from .decoder import decoder_shapes as decoder_shapes
from .decoder import init_decoder as init_decoder
from .decoder_config import DecoderConfig as DecoderConfig
from .decoder_config import LinearRopeScaling as LinearRopeScaling
from .decoder_config import Llama3RopeScaling as Llama3RopeScaling
from .decoder_config import LongRopeScaling as LongRopeScaling
from .decoder_config import YarnRopeScaling as YarnRopeScaling
from .decoder_module import Decoder as Decoder
from .densenet import DenseNet as DenseNet
from .densenet import densenet40_12 as densenet40_12
from .densenet import densenet100_12 as densenet100_12
from .densenet import densenet121 as densenet121
from .densenet import densenet161 as densenet161
from .densenet import densenet169 as densenet169
from .densenet import densenet201 as densenet201
from .densenet import densenet_cifar as densenet_cifar
from .detection import DenoisingQueries as DenoisingQueries
from .detection import DetectorOutput as DetectorOutput
from .detection import Predictions as Predictions
from .detection import Targets as Targets
from .detection import decode_detections as decode_detections
from .detection import detection_loss as detection_loss
from .detection import make_denoising_queries as make_denoising_queries
from .detection import match as match
from .generate import Generation as Generation
from .generate import generate as generate
from .pyramid import FeaturePyramid as FeaturePyramid
from .resnet import ResNet as ResNet
from .resnet import resnet18 as resnet18
from .resnet import resnet34 as resnet34
from .resnet import resnet50 as resnet50
from .resnet import resnet101 as resnet101
from .resnet import resnet152 as resnet152
from .resnet import resnext50_32x4d as resnext50_32x4d
from .resnet import resnext101_32x8d as resnext101_32x8d
from .resnet import resnext101_64x4d as resnext101_64x4d
from .resnet import wide_resnet50_2 as wide_resnet50_2
from .resnet import wide_resnet101_2 as wide_resnet101_2
from .rt_detr import RTDetr as RTDetr
from .rt_detr_config import RTDetrConfig as RTDetrConfig


def __dir__() -> list[str]:
    return sorted([*_list_public(globals()), *({"linen"} & globals().keys())])
