"""Configuration of RT-DETR, from and to a checkpoint's config.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from .._files import MAX_SIZE
from ..ops._common.arguments import (
    as_integer,
    as_number,
    check_choice,
    check_divides,
    check_instance,
)
from .images import as_sizes

ARCHITECTURES = {
    "rt_detr": "RTDetrForObjectDetection",
    "rt_detr_v2": "RTDetrV2ForObjectDetection",
}
ACTIVATIONS = "relu", "silu", "gelu", "gelu_new"
# Keys of config.json, and of its `backbone_config`, whose other values would change the network or
# its training. null or no key are the same.
SUPPORTED = {
    "backbone": None, "use_timm_backbone": False, "eval_size": None, "learn_initial_query": False,
    "with_box_refine": True, "use_focal_loss": True, "decoder_method": "default", "dropout": 0,
    "activation_dropout": 0, "attention_dropout": 0,
}  # fmt: skip
SUPPORTED_BACKBONE = {
    "model_type": "rt_detr_resnet", "hidden_act": "relu", "downsample_in_first_stage": False,
}  # fmt: skip
MAY_BE_ZERO = "cost", "gamma", "ratio", "scale", "encoder_layers", "num_denoising", "loss"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Options of the ResNet of an RT-DETR, with the names of `backbone_config` in config.json."""

    num_channels: int = 3
    embedding_size: int = 64
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layer_type: str = "bottleneck"
    downsample_in_bottleneck: bool = False
    out_indices: tuple[int, ...] = (2, 3, 4)

    def __post_init__(self) -> None:
        check_choice("layer_type", self.layer_type, "basic", "bottleneck")
        for name in ("depths", "out_indices"):
            object.__setattr__(self, name, as_sizes(name, getattr(self, name)))
        for name in ("num_channels", "embedding_size"):
            as_integer(name, getattr(self, name), 1, MAX_SIZE)
        stages = len(self.depths)
        if self.out_indices != tuple(range(self.out_indices[0], stages + 1)):
            raise ValueError(
                f"`out_indices` (={self.out_indices}) must be successive numbers up to that of the "
                f"stages (={stages}); others are not supported."
            )

    @property
    def hidden_sizes(self) -> list[int]:
        """The channels of the stages."""
        first = self.embedding_size * (4 if self.layer_type == "bottleneck" else 1)
        return [first << stage for stage in range(len(self.depths))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RTDetrConfig:
    """Configuration of an RT-DETR; the names and defaults are those of config.json.

    Args:
        model_type: "rt_detr" or "rt_detr_v2".
        id2label: the names of the classes, in order.
        backbone_config: that of the ResNet, a mapping.
        freeze_backbone_batch_norms: whether the norms of the backbone are constants.
        layer_norm_eps, batch_norm_eps: added to variances. The norms of the backbone and those that
            follow it have 1e-5.
        encoder_*: sizes of the encoder.
        encode_proj_layers: the levels with self-attention.
        positional_encoding_temperature: base of the wavelengths of position embeddings.
        encoder_activation_function, activation_function, decoder_activation_function: of the
            encoder's MLPs, of convolutions, and of the decoder's MLPs: "relu", "silu", "gelu" or
            "gelu_new".
        normalize_before: whether the encoder's layers normalize their inputs.
        hidden_expansion: inner channels of convolution blocks, relative to `encoder_hidden_dim`.
        d_model, decoder_*: sizes of the decoder.
        num_queries: the number of boxes of an image.
        num_feature_levels, decoder_n_points: the levels, and the points of each, that a head reads.
        decoder_offset_scale: of rt_detr_v2: unit of the points' offsets, in sizes of the box.
        num_denoising, label_noise_ratio, box_noise_scale: of the denoising queries in training.
        initializer_bias_prior_prob: initial probability of a class; None for 1 / (classes + 1).
        auxiliary_loss: whether all layers of the decoder have losses.
        matcher_*, weight_loss_*, focal_loss_*: of the loss.

    Raises:
        TypeError, ValueError: if a value has the wrong type, is out of range, or does not fit the
            others.
    """

    model_type: str = "rt_detr"
    id2label: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    backbone_config: BackboneConfig = BackboneConfig()
    freeze_backbone_batch_norms: bool = True
    layer_norm_eps: float = 1e-5
    batch_norm_eps: float = 1e-5
    encoder_hidden_dim: int = 256
    encoder_layers: int = 1
    encoder_ffn_dim: int = 1024
    encoder_attention_heads: int = 8
    encode_proj_layers: tuple[int, ...] = (2,)
    positional_encoding_temperature: int = 10000
    encoder_activation_function: str = "gelu"
    activation_function: str = "silu"
    normalize_before: bool = False
    hidden_expansion: float = 1.0
    d_model: int = 256
    num_queries: int = 300
    decoder_ffn_dim: int = 1024
    num_feature_levels: int = 3
    decoder_n_points: int = 4
    decoder_layers: int = 6
    decoder_attention_heads: int = 8
    decoder_activation_function: str = "relu"
    decoder_offset_scale: float = 0.5
    num_denoising: int = 100
    label_noise_ratio: float = 0.5
    box_noise_scale: float = 1.0
    initializer_bias_prior_prob: float | None = None
    auxiliary_loss: bool = True
    matcher_alpha: float = 0.25
    matcher_gamma: float = 2.0
    matcher_class_cost: float = 2.0
    matcher_bbox_cost: float = 5.0
    matcher_giou_cost: float = 2.0
    focal_loss_alpha: float = 0.75
    focal_loss_gamma: float = 2.0
    weight_loss_vfl: float = 1.0
    weight_loss_bbox: float = 5.0
    weight_loss_giou: float = 2.0

    def __post_init__(self) -> None:
        check_choice("model_type", self.model_type, *ARCHITECTURES)
        backbone = self.backbone_config
        if isinstance(backbone, Mapping):
            object.__setattr__(self, "backbone_config", _parse_backbone(backbone))
        for name in ("id2label", "encode_proj_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            low = 0 if any(part in name for part in MAY_BE_ZERO) else 1
            if name.endswith("_function"):
                check_choice(name, value, *ACTIVATIONS)
            elif isinstance(field.default, bool):
                check_instance(name, value, bool, "a bool")
            elif isinstance(field.default, int):
                as_integer(name, value, low, MAX_SIZE)
            elif isinstance(field.default, float):
                least = 0.0 if low == 0 else math.ulp(0.0)
                expected = "at least 0" if low == 0 else "positive"
                as_number(name, value, lambda a, least=least: least <= a < math.inf, expected)
        if (prior := self.initializer_bias_prior_prob) is not None:
            as_number("initializer_bias_prior_prob", prior, lambda a: 0 < a < 1, "in (0, 1)")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if not self.id2label or not all(isinstance(name, str) for name in self.id2label):
            raise ValueError(f"`id2label` (={self.id2label!r:.80}) must name at least one class.")
        hidden, levels = self.encoder_hidden_dim, len(self.backbone_config.out_indices)
        check_divides("encoder_attention_heads", self.encoder_attention_heads, hidden, "channels")
        heads = self.decoder_attention_heads
        check_divides("decoder_attention_heads", heads, self.d_model, "channels")
        if hidden % 4 or self.hidden_features < 1:
            raise ValueError(
                f"`encoder_hidden_dim` (={hidden}) must be a multiple of 4, and `hidden_expansion` "
                f"(={self.hidden_expansion}) times it at least 1."
            )
        if self.num_feature_levels != levels:
            raise ValueError(
                f"`num_feature_levels` (={self.num_feature_levels}) must be the number of "
                f"`out_indices` of the backbone (={levels}); more levels are not supported."
            )
        for level in self.encode_proj_layers:
            as_integer("encode_proj_layers", level, 0, levels - 1)
        if self.model_type == "rt_detr" and self.decoder_offset_scale != 0.5:
            raise ValueError("`decoder_offset_scale` must be 0.5, unless model_type='rt_detr_v2'.")

    @property
    def num_labels(self) -> int:
        """The number of classes."""
        return len(self.id2label)

    @property
    def hidden_features(self) -> int:
        """The inner channels of the encoder's convolution blocks."""
        return int(self.encoder_hidden_dim * self.hidden_expansion)

    @property
    def stride(self) -> int:
        """The stride of the coarsest level, which must divide the sides of images."""
        return 2 ** (len(self.backbone_config.depths) + 1)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "RTDetrConfig":
        """Return the configuration in the content of a config.json.

        Keys that change neither the network nor its training are not kept.

        Args:
            settings: the content; `num_labels` may stand for `id2label`.

        Raises:
            TypeError, ValueError: as of the class; or if a key asks for something that is not
                supported, such as a backbone of timm.
        """
        check_instance("settings", settings, Mapping, "the content of a config.json, a dict")
        fields = _select_fields(cls, settings)
        labels = fields.get("id2label")
        if isinstance(labels, Mapping):
            by_number = {str(number): str(name) for number, name in labels.items()}
            order = [str(i) for i in range(len(by_number))]
            if by_number.keys() != {*order}:
                raise ValueError("`id2label` of config.json must have the numbers from 0.")
            fields["id2label"] = tuple(by_number[i] for i in order)
        elif labels is None and (count := settings.get("num_labels")) is not None:
            count = as_integer("num_labels", count, 1, MAX_SIZE)
            fields["id2label"] = tuple(f"LABEL_{i}" for i in range(count))
        config = cls(**fields)
        _refuse_unsupported(settings, SUPPORTED | config._implied())
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a config.json that transformers reads."""
        settings = dataclasses.asdict(self) | self._implied()
        settings["architectures"] = [ARCHITECTURES[self.model_type]]
        settings["backbone_config"] |= {
            "model_type": "rt_detr_resnet", "hidden_sizes": self.backbone_config.hidden_sizes
        }  # fmt: skip
        settings["id2label"] = {str(i): name for i, name in enumerate(self.id2label)}
        settings["label2id"] = {name: i for i, name in enumerate(self.id2label)}
        return settings

    def _implied(self) -> dict[str, Any]:
        """Return the keys of config.json that follow from others."""
        indices = self.backbone_config.out_indices
        return {
            "encoder_in_channels": [self.backbone_config.hidden_sizes[i - 1] for i in indices],
            "feat_strides": [2 ** (i + 1) for i in indices],
            "decoder_in_channels": [self.encoder_hidden_dim] * len(indices),
            "decoder_n_levels": len(indices),
        }


def _parse_backbone(settings: Mapping[str, Any]) -> BackboneConfig:
    fields = _select_fields(BackboneConfig, settings)
    if "out_indices" not in fields and (stages := settings.get("out_features")) is not None:
        fields["out_indices"] = [int(str(stage).removeprefix("stage")) for stage in stages]
    config = BackboneConfig(**fields)
    _refuse_unsupported(settings, SUPPORTED_BACKBONE | {"hidden_sizes": config.hidden_sizes})
    return config


def _select_fields(config_type: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config_type)}
    return {name: v for name, v in settings.items() if name in names and v is not None}


def _refuse_unsupported(settings: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    for name, value in supported.items():
        given = settings.get(name)
        given = list(given) if isinstance(given, tuple) else given
        if given is not None and given != value:
            raise ValueError(
                f"`{name}` (={given!r:.80}) of config.json must be {value!r}; other values are not "
                "supported."
            )
