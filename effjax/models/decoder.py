"""Decoders of the Llama family and its relatives, configured by a checkpoint's config.json.

Parameters have the names and shapes of Hugging Face's checkpoints. `layers` is a flat dict of the
names after ``model.layers.N.``, stacked over the layers: ``"self_attn.q_proj.weight"`` is
``[L, out, in]``. `others` is a flat dict of the names outside the layers.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import types
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._files import read_json_object
from ..ops._common.arguments import (
    as_array,
    as_bool,
    as_dtype,
    as_integer,
    as_key,
    as_number,
    check_choice,
    check_instance,
    check_named_arrays,
    describe,
)
from ..ops._common.dtypes import accumulation_dtype, at_least_float32
from ..ops._common.sharding import explicit_axes, explicit_spec
from ..ops.attention import IMPLEMENTATIONS, dot_product_attention
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.quantize import FORMATS, Format, Quantized, quantize, quantized_linear

Params = dict[str, Any]
Linear = Callable[[str, jax.Array], jax.Array]  # (name of a linear layer, x)
# ``attend(q, k, v, x) -> (y, x)`` of arrays [N, T, heads, head_dim] and the input of the layer.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Params], tuple[jax.Array, Params]]


class Lora(NamedTuple):
    """Static options of adapters: the factor of B (A x), and the share of x that is dropped."""

    scale: float = 1.0
    dropout: float = 0.0


class _Norms(NamedTuple):
    """Names of the norms of a layer, before and after attention and the MLP; None for no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class _Family(NamedTuple):
    """A family of decoders, as its differences from Llama.

    Attributes:
        architecture: The class of transformers.
        options: Of `OPTIONS`, the keys of config.json that the family has.
        defaults: Values of keys that config.json may lack, where they are not those of Llama.
        has_qkv_bias: Whether queries, keys and values always have biases.
        qk_norm: Whether queries and keys are normalized, each head or all heads together.
        is_fused: Whether one matrix makes queries, keys and values, and one gate and up.
        norms: The norms of a layer.
        norm_offset: What is added to the weights of norms.
        activation: That of the gate.
        activation_key: Its key in config.json.
        scales_embedding: Whether embeddings are multiplied by the root of the width.
    """

    architecture: str
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    has_qkv_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    is_fused: bool = False
    norms: _Norms = _Norms()
    norm_offset: float = 0.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    scales_embedding: bool = False


BIASES = "attention_bias", "mlp_bias"
GRANITE_FACTORS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip
SOFT_CAPS = "attn_logit_softcapping", "final_logit_softcapping"
GEMMA_OPTIONS = (
    "attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", *SOFT_CAPS,
)  # fmt: skip
# Keys of config.json that some families have. The others must have the default of the field.
OPTIONS = (
    *BIASES, *GRANITE_FACTORS, *GEMMA_OPTIONS, "no_rope_layers", "partial_rotary_factor",
    "rope_local_base_freq",
)  # fmt: skip
# Of these, null in config.json is a value.
NULLABLE = ("sliding_window", *SOFT_CAPS)
SLIDING, FULL = "sliding_attention", "full_attention"  # in `layer_types`
GEMMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "norms": _Norms(
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "norm_offset": 1.0, "activation": "gelu_pytorch_tanh", "activation_key": "hidden_activation",
    "scales_embedding": True,
}  # fmt: skip
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", BIASES),
    "mistral": _Family(
        "MistralForCausalLM", ("sliding_window",),
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Family("Qwen2ForCausalLM", (), {"num_key_value_heads": 32}, has_qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM", ("attention_bias",), {"num_key_value_heads": 32, "head_dim": 128},
        qk_norm="head",
    ),
    "granite": _Family(
        "GraniteForCausalLM", (*BIASES, *GRANITE_FACTORS), {"attention_multiplier": 1.0}
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM", (*BIASES, "no_rope_layers"),
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM", ("attention_bias",), {"rms_norm_eps": 1e-5}, qk_norm="all",
        norms=_Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ),
    "phi3": _Family(
        "Phi3ForCausalLM", ("sliding_window", "partial_rotary_factor"), {"rms_norm_eps": 1e-5},
        is_fused=True,
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM", GEMMA_OPTIONS,
        GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **GEMMA,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM", (*GEMMA_OPTIONS, "rope_local_base_freq"),
        GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        qk_norm="head", **GEMMA,
    ),
}  # fmt: skip
CODES, SCALES = ".codes", ".scales"  # follow the name of a weight that is quantized
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
# Probabilities of config.json. Generation and evaluation drop nothing.
DROPOUTS = "attention_dropout", "resid_pdrop", "embd_pdrop"


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Scaling of the rotary frequencies of Llama 3.1 and later; the names are config.json's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _as_positive(field.name, getattr(self, field.name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"`high_freq_factor` (={self.high_freq_factor}) must be larger than "
                f"`low_freq_factor` (={self.low_freq_factor})."
            )


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Division of all rotary frequencies by a factor."""

    factor: float

    def __post_init__(self) -> None:
        _as_positive("factor", self.factor)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Scaling of the rotary frequencies of Phi 3 and 4; the names are config.json's.

    Attributes:
        short_factor: divisors of the frequencies, for rows of at most
            `original_max_position_embeddings` positions.
        long_factor: those for longer rows.
        original_max_position_embeddings: the longest row with short factors. The length of a row is
            that of its arrays, and in generation the prompts with `max_new_tokens`.
        attention_factor: factor of the rotated queries and keys.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = tuple(_as_positive(name, factor) for factor in getattr(self, name))
            object.__setattr__(self, name, factors)
        for name in ("original_max_position_embeddings", "attention_factor"):
            _as_positive(name, getattr(self, name))


RopeScaling = Llama3RopeScaling | LinearRopeScaling | LongRopeScaling
_SCALINGS: dict[str, type[RopeScaling]] = {
    "llama3": Llama3RopeScaling, "linear": LinearRopeScaling, "longrope": LongRopeScaling,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a decoder; the names are those of a checkpoint's config.json.

    Attributes:
        model_type: the family: "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2",
            "phi3", "gemma2" or "gemma3_text".
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        num_attention_heads: heads of queries; `num_key_value_heads` divides it.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
        rms_norm_eps: the epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: their scaling. None means none.
        sliding_window: of mistral, phi3 and gemma: number of positions that a token attends to, its
            own included. None means all earlier ones and itself.
        layer_types: of gemma: "sliding_attention" or "full_attention" for each layer. None means
            windows in all layers, if there is a `sliding_window`.
        no_rope_layers: of smollm3: for each layer 1, or 0 if nothing is rotated in it. None means
            that all rotate.
        partial_rotary_factor: of phi3: the share of the channels of a head that is rotated, the
            first ones.
        rope_local_base_freq: of gemma3_text: base of the rotary frequencies in layers with a
            window, where they are not scaled. None means `rope_theta`.
        attention_bias: of llama, qwen3, granite, smollm3, olmo2 and gemma: whether the linear
            layers of attention have biases. Queries, keys and values of qwen2 always have them.
        mlp_bias: of llama, granite and smollm3: whether the linear layers of the MLP have biases.
        query_pre_attn_scalar: of gemma: the scores are divided by its root. None means `head_dim`.
        attn_logit_softcapping, final_logit_softcapping: of gemma: bounds c of the scores and of the
            logits, which become c * tanh(s / c). None means no bound.
        embedding_multiplier, residual_multiplier: of granite: factors of the embeddings, and of the
            results of attention and MLP.
        attention_multiplier: of granite: factor of the scores. None means 1 / sqrt(head_dim).
        logits_scaling: of granite: divisor of the logits.
        tie_word_embeddings: whether the embedding is also the head.
        dtype: of the parameters.
        other_settings: the other keys of config.json, as JSON text. They do not change the network.
            `attention_dropout` and other dropout is not applied: a layer that is called with a key,
            and `effjax finetune`, refuse a value above 0.

    Raises:
        TypeError: for a size or a number of another type.
        ValueError: for an unknown family, an option that the family does not have, sizes that do
            not match, or other settings that are not JSON.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    partial_rotary_factor: float = 1.0
    rope_local_base_freq: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    other_settings: str = dataclasses.field(default="{}", repr=False)

    def __post_init__(self) -> None:
        family = _family(self.model_type)
        for name in (*SIZES, "num_key_value_heads", "head_dim"):
            self._set(name, as_integer(name, getattr(self, name), 1))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` (={self.num_key_value_heads}) must divide "
                f"`num_attention_heads` (={self.num_attention_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`head_dim` (={self.head_dim}) must be even: rotary embeddings rotate pairs."
            )
        for name in ("rms_norm_eps", "rope_theta"):
            self._set(name, _as_positive(name, getattr(self, name)))
        check_instance(
            "rope_scaling",
            self.rope_scaling,
            RopeScaling | None,
            "a Llama3RopeScaling, LinearRopeScaling, LongRopeScaling or None",
        )
        if self.sliding_window is not None:
            self._set("sliding_window", as_integer("sliding_window", self.sliding_window, 1))
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            self._set(name, as_bool(name, getattr(self, name)))
        self._check_options(family)
        self._check_rotary()
        self._set("dtype", as_dtype("dtype", self.dtype).name)
        settings = _parse_settings(self.other_settings)
        if (deviation := settings.get("initializer_range")) is not None:
            as_number("initializer_range", deviation, lambda a: 0 <= a < math.inf, "at least 0")
        for name in DROPOUTS:
            if settings.get(name) is not None:
                as_number(name, settings[name], lambda a: 0 <= a < 1, "in [0, 1)")

    def _check_options(self, family: "_Family") -> None:
        """Check and complete the fields that only some families have."""
        neutral = {
            "attention_multiplier": self.head_dim**-0.5,
            "query_pre_attn_scalar": self.head_dim,
            "rope_local_base_freq": self.rope_theta,
            "layer_types": (FULL if self.sliding_window is None else SLIDING,)
            * self.num_hidden_layers,
            "no_rope_layers": (1,) * self.num_hidden_layers,
        }
        for name, value in neutral.items():
            if name in family.options and getattr(self, name) is None:
                self._set(name, value)
        numbers = (
            *GRANITE_FACTORS, *SOFT_CAPS, "rope_local_base_freq", "partial_rotary_factor",
        )  # fmt: skip
        for name in numbers:
            if (value := getattr(self, name)) is not None:
                self._set(name, _as_positive(name, value))
        if (divisor := self.query_pre_attn_scalar) is not None:
            self._set("query_pre_attn_scalar", as_integer("query_pre_attn_scalar", divisor, 1))
        self._check_layers("layer_types", (SLIDING, FULL))
        self._check_layers("no_rope_layers", (0, 1))
        if SLIDING in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError(f"`layer_types` has {SLIDING!r}, which needs a `sliding_window`.")
        for field in dataclasses.fields(self):
            # `to_json` cannot write it: transformers would run another network.
            is_missing = field.name in OPTIONS and field.name not in family.options
            if is_missing and (value := getattr(self, field.name)) != field.default:
                raise ValueError(
                    f"`{field.name}` (={value}) is not supported by {self.model_type}."
                )

    def _check_rotary(self) -> None:
        width = self.rotary_dim
        if self.partial_rotary_factor > 1 or not width or width % 2:
            raise ValueError(
                f"`partial_rotary_factor` (={self.partial_rotary_factor}) must be at most 1 and "
                f"rotate an even number of the channels of a head (={self.head_dim})."
            )
        if isinstance(self.rope_scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.rope_scaling, name))) != width // 2:
                    raise ValueError(
                        f"`{name}` must have {width // 2} numbers, one for each pair of rotated "
                        f"channels, not {count}."
                    )

    def _check_layers(self, name: str, choices: tuple[Any, ...]) -> None:
        """Check a field with a value for each layer, and make it a tuple."""
        if (values := getattr(self, name)) is None:
            return
        count = self.num_hidden_layers
        is_list = isinstance(values, (list, tuple))
        if not is_list or len(values) != count or not all(v in choices for v in values):
            known = " or ".join(map(repr, choices))
            raise ValueError(
                f"`{name}` (={values!r:.80}) must have {known} for each of the {count} layers."
            )
        self._set(name, tuple(values))

    def _set(self, name: str, value: Any) -> None:
        """Replace a NumPy scalar, which `to_json` cannot write, in a frozen dataclass."""
        object.__setattr__(self, name, value)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> "DecoderConfig":
        """Return the configuration of a config.json.

        Args:
            source: the file, the folder of a checkpoint, or the content as a dict.

        Raises:
            ValueError: for a network that is not supported, and for missing or invalid keys.
            OSError: if the file cannot be read.
        """
        settings = dict(source) if isinstance(source, Mapping) else _read(pathlib.Path(source))
        try:
            return _parse(settings)
        except (TypeError, OverflowError, RecursionError) as error:  # for any content of a file
            raise ValueError(f"config.json is invalid: {error!s:.200}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the content of a config.json, for transformers and `from_json`."""
        family = _FAMILIES[self.model_type]
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings = json.loads(fields.pop("other_settings"))
        for name in set(OPTIONS) - {*family.options}:
            del fields[name]
        fields = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
        if (scaling := self.rope_scaling) is not None:
            kind = next(kind for kind, form in _SCALINGS.items() if isinstance(scaling, form))
            values = dataclasses.asdict(scaling)
            values = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
            fields["rope_scaling"] = {"rope_type": kind, **values}
        if isinstance(scaling, LongRopeScaling) and self.model_type == "phi3":
            # transformers prefers this key to that of `rope_scaling`.
            original = scaling.original_max_position_embeddings
            settings["original_max_position_embeddings"] = original
        fields["torch_dtype"] = fields.pop("dtype")
        names = {
            "architectures": [family.architecture],
            family.activation_key: family.activation,
        }
        return {**names, **settings, **fields}

    @property
    def has_qk_norm(self) -> bool:
        """True if queries and keys are normalized."""
        return _FAMILIES[self.model_type].qk_norm is not None

    @property
    def has_qkv_bias(self) -> bool:
        """True if the linear layers of queries, keys and values have biases."""
        return self.attention_bias or _FAMILIES[self.model_type].has_qkv_bias

    @property
    def attention_scale(self) -> float:
        """The factor of the scores of attention."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar**-0.5
        return self.attention_multiplier or self.head_dim**-0.5

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings."""
        root = math.sqrt(self.hidden_size)
        return root if _FAMILIES[self.model_type].scales_embedding else self.embedding_multiplier

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of positions that a token attends to, in each layer; None for all."""
        if self.layer_types is None:
            return (self.sliding_window,) * self.num_hidden_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in self.layer_types)

    @property
    def layers_differ(self) -> bool:
        """True if layers have different windows or rotary frequencies."""
        by_layer = self.layer_types or (), self.no_rope_layers or ()
        return any(len({*kinds}) > 1 for kinds in by_layer)


def _family(model_type: Any) -> _Family:
    """Return the family of a `model_type`, or raise ValueError."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(f'"{name}"' for name in _FAMILIES)
        hint = ""
        if model_type == "gemma3":
            hint = ' It also reads images; only its text model, "gemma3_text", is supported.'
        raise ValueError(f"`model_type` (={model_type!r:.80}) must be one of {known}.{hint}")
    return _FAMILIES[model_type]


def check_dropout(config: DecoderConfig) -> None:
    """Raise ValueError if training as config.json says needs dropout, which is not supported."""
    settings = _parse_settings(config.other_settings)
    for name in DROPOUTS:
        if settings.get(name):
            raise ValueError(
                f"`{name}` (={settings[name]}) of config.json is not supported in training. Set it "
                "to 0 there to train without this dropout; generation never drops."
            )


def _parse_settings(text: str) -> dict[str, Any]:
    """Return the object in the JSON text `other_settings`."""
    try:
        settings = json.loads(text)
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"`other_settings` (={text!r:.80}) must be the JSON text of an object.")
    return settings


def _as_positive(name: str, value: Any) -> float:
    return as_number(name, value, lambda number: 0 < number < math.inf, "positive and finite")


def _read(path: pathlib.Path) -> dict[str, Any]:
    """Return the content of a config.json, given the file or its folder."""
    path = path / "config.json" if path.is_dir() else path
    return read_json_object(path, "a config.json")


def _parse(settings: dict[str, Any]) -> DecoderConfig:
    """Return the configuration of the content of a config.json; empties `settings` of its keys."""
    model_type = settings.pop("model_type", None)
    family = _family(model_type)
    _refuse_unsupported(model_type, settings)
    fields: dict[str, Any] = {"model_type": model_type}
    for name in SIZES:
        if name not in settings:
            raise ValueError(f"config.json lacks `{name}`.")
        fields[name] = as_integer(name, settings.pop(name), 1)
    heads = fields["num_attention_heads"]
    values = {**family.defaults, **{n: v for n, v in settings.items() if v is not None}}
    values = _default_layers(model_type, fields["num_hidden_layers"], values) | values
    fields["num_key_value_heads"] = values.get("num_key_value_heads", heads)
    if "head_dim" in values:
        fields["head_dim"] = values["head_dim"]
    else:
        fields["head_dim"], rest = divmod(fields["hidden_size"], heads)
        if rest:
            raise ValueError(
                f"`num_attention_heads` (={heads}) must divide `hidden_size` "
                f"(={fields['hidden_size']}), because config.json lacks `head_dim`."
            )
    fields |= _parse_rope(family, settings)
    # Those of rotary embeddings may be in `rope_parameters`, too.
    names = [n for n in ("rms_norm_eps", "tie_word_embeddings", *family.options) if n not in fields]
    for name in names:
        if name in NULLABLE and name in settings:
            fields[name] = settings[name]
        elif name in values:
            fields[name] = values[name]
    fields["dtype"] = _parse_dtype(values)
    for name in ("num_key_value_heads", "head_dim", "dtype", "torch_dtype", *names):
        settings.pop(name, None)
    for name in ("architectures", "hidden_act", "hidden_activation"):  # written by `to_json`
        settings.pop(name, None)
    return DecoderConfig(**fields, other_settings=json.dumps(settings, sort_keys=True))


def _parse_dtype(settings: Mapping[str, Any]) -> Any:
    """Return the dtype of config.json: "bfloat16" also of "torch.bfloat16".

    "auto", as no dtype, leaves it to the reader of the weights: float32 holds any of them.
    """
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    return "float32" if dtype in (None, "auto") else dtype


def _default_layers(model_type: str, count: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for each layer that config.json may lack."""
    if model_type == "smollm3":
        every = as_integer("no_rope_layer_interval", values.get("no_rope_layer_interval", 4), 1)
        return {"no_rope_layers": [int((i + 1) % every != 0) for i in range(count)]}
    if model_type.startswith("gemma"):
        every = 2
        if model_type == "gemma3_text":
            every = as_integer("sliding_window_pattern", values.get("sliding_window_pattern", 6), 1)
        return {"layer_types": [SLIDING if (i + 1) % every else FULL for i in range(count)]}
    return {}


def _parse_rope(family: _Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary embeddings, from the keys of transformers 4 or 5."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.pop(name, None)
        if not isinstance(value, Mapping | None):
            raise ValueError(f"`{name}` of config.json must be an object, not {describe(value)}.")
        rope |= value or {}
    named = {n: settings.pop(n, None) for n in ("rope_theta", "rope_local_base_freq")}
    named["partial_rotary_factor"] = settings.pop("partial_rotary_factor", None)
    if "rope_local_base_freq" in family.options:
        local, rope = rope.pop(SLIDING, None) or {}, rope | (rope.pop(FULL, None) or {})
        if local.get("rope_type", "default") != "default":
            raise ValueError(f'`rope_type` of {SLIDING} in config.json must be "default".')
        named["rope_local_base_freq"] = local.get("rope_theta", named["rope_local_base_freq"])
    elif (value := named.pop("rope_local_base_freq")) is not None:
        settings["rope_local_base_freq"] = value  # an unused key
    for name in ("rope_theta", "partial_rotary_factor"):
        named[name] = rope.get(name, named[name])
    fields = {
        name: family.defaults.get(name) if value is None else value for name, value in named.items()
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        kind = "one for each type of layer"
    is_partial = fields["partial_rotary_factor"] not in (None, 1)
    if is_partial and "partial_rotary_factor" not in family.options:
        kind = f"{kind} with partial_rotary_factor"
    fields["rope_scaling"] = _parse_scaling("longrope" if kind == "su" else kind, rope, settings)
    return {name: value for name, value in fields.items() if value is not None}


def _parse_scaling(
    kind: str, rope: dict[str, Any], settings: Mapping[str, Any]
) -> RopeScaling | None:
    """Return the scaling of rotary frequencies of a `rope_type`."""
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        known = ", ".join(f'"{name}"' for name in ("default", *_SCALINGS))
        raise ValueError(
            f"`rope_type` (={kind!r:.80}) of config.json must be one of {known}; others are not "
            "supported."
        )
    longest = settings.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings", longest)
    if kind == "longrope":
        original = settings.get("original_max_position_embeddings", original)
        if rope.get("attention_factor") is None:
            factor = rope.get("factor")
            factor = longest / original if factor is None else factor
            root = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            rope["attention_factor"] = root
    rope["original_max_position_embeddings"] = original
    names = [f.name for f in dataclasses.fields(_SCALINGS[kind])]
    for name in names:
        if rope.get(name) is None:
            raise ValueError(f"The {kind} scaling of config.json lacks `{name}`.")
    return _SCALINGS[kind](*(rope[name] for name in names))


def _refuse_unsupported(model_type: str, settings: dict[str, Any]) -> None:
    """Raise ValueError for settings that would change the network."""
    family = _FAMILIES[model_type]
    supported: dict[str, Any] = {
        "hidden_act": family.activation,
        "hidden_activation": family.activation,
        "quantization_config": None,
        "use_bidirectional_attention": False,
    }
    if model_type.startswith("qwen") or model_type == "smollm3":
        supported["use_sliding_window"] = False
    for name, value in supported.items():
        if settings.get(name) not in (None, value):
            raise ValueError(
                f"`{name}` (={settings[name]!r:.80}) of config.json must be {value!r}; other "
                "values are not supported."
            )
    if "layer_types" not in family.options and SLIDING in (settings.get("layer_types") or ()):
        raise ValueError('`layer_types` of config.json must all be "full_attention".')


def check_config(config: Any) -> None:
    """Raise TypeError unless `config` is a DecoderConfig."""
    check_instance("config", config, DecoderConfig, "a DecoderConfig")


def decoder_shapes(
    config: DecoderConfig, *, quantize: Format | None = None
) -> tuple[Params, Params]:
    """Return the shapes and dtypes of a decoder's parameters.

    Args:
        config: the configuration.
        quantize: "nf4" or "int8" for the weights of the linear layers in 4 or 8 bits. Each is two
            arrays then: ``"self_attn.q_proj.weight.codes"``, packed, and ``"….scales"``, the
            largest magnitude of each 64 values of a row. They are frozen: gradients are those of
            adapters and of x. `effjax.convert.load_checkpoint` quantizes weights while it reads
            them.

    Returns:
        ``(layers, others)`` of `jax.ShapeDtypeStruct` by name. The arrays of `layers` have a
        leading axis of layers.

    Raises:
        TypeError: for a configuration of another type.
        ValueError: for an unknown way to quantize.
    """
    check_config(config)
    check_choice("quantize", quantize, None, *FORMATS)
    width, hidden = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    family = _FAMILIES[config.model_type]
    if family.is_fused:
        linear = {  # [out, in], and whether there is a bias
            "self_attn.qkv_proj": ((heads + 2 * kv_heads, width), False),
            "self_attn.o_proj": ((width, heads), False),
            "mlp.gate_up_proj": ((2 * hidden, width), False),
            "mlp.down_proj": ((width, hidden), False),
        }
    else:
        linear = {
            "self_attn.q_proj": ((heads, width), config.has_qkv_bias),
            "self_attn.k_proj": ((kv_heads, width), config.has_qkv_bias),
            "self_attn.v_proj": ((kv_heads, width), config.has_qkv_bias),
            "self_attn.o_proj": ((width, heads), config.attention_bias),
            "mlp.gate_proj": ((hidden, width), config.mlp_bias),
            "mlp.up_proj": ((hidden, width), config.mlp_bias),
            "mlp.down_proj": ((width, hidden), config.mlp_bias),
        }
    layers = {f"{name}.weight": shape for name, (shape, _) in linear.items()}
    layers |= {f"{name}.bias": shape[:1] for name, (shape, has_bias) in linear.items() if has_bias}
    layers |= {f"{name}.weight": (width,) for name in family.norms if name is not None}
    if family.qk_norm is not None:
        is_all = family.qk_norm == "all"
        layers["self_attn.q_norm.weight"] = (heads if is_all else config.head_dim,)
        layers["self_attn.k_norm.weight"] = (kv_heads if is_all else config.head_dim,)
    others = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not config.tie_word_embeddings:
        others["lm_head.weight"] = (config.vocab_size, width)
    dtype = jnp.dtype(config.dtype)
    stacked = {
        name: jax.ShapeDtypeStruct((config.num_hidden_layers, *shape), dtype)
        for name, shape in layers.items()
    }
    if quantize is not None:
        stacked = _quantized_shapes(stacked, [f"{name}.weight" for name in linear], quantize)
    return stacked, {name: jax.ShapeDtypeStruct(s, dtype) for name, s in others.items()}


def _quantized_shapes(shapes: Params, names: Collection[str], form: Format) -> Params:
    """Return the shapes with codes and scales in place of the named weights."""
    result: Params = {}
    for name, a in shapes.items():
        if name in names:
            pair = jax.eval_shape(functools.partial(quantize, form=form), a)
            result |= {name + CODES: pair.codes, name + SCALES: pair.scales}
        else:
            result[name] = a
    return result


def check_layers(config: DecoderConfig, layers: Any) -> None:
    """Raise an error unless `layers` has all arrays of a decoder, quantized or not."""
    check_named_arrays("layers", layers)
    is_quantized = any(name.endswith(CODES) for name in layers)
    needed, _ = decoder_shapes(config, quantize="nf4" if is_quantized else None)
    check_named_arrays("layers", layers, needed)


def init_decoder(config: DecoderConfig, key: jax.Array) -> tuple[Params, Params]:
    """Return random parameters ``(layers, others)``, of the shapes of `decoder_shapes`.

    Weights are drawn from N(0, 0.02²), or with the standard deviation `initializer_range` of
    config.json. Those of norms are such that they multiply by 1, and biases are 0.

    All arrays are created whole on the default device. To create layers in host memory, pass
    `init_decoder_layer` and `decoder_layer_keys` to `effjax.host_init`::

        init = functools.partial(init_decoder_layer, config)
        layers = host_init(init, decoder_layer_keys(config, key))
    """
    key = as_key("key", key)
    init = functools.partial(init_decoder_layer, config)
    layers = jax.vmap(init)(decoder_layer_keys(config, key))
    return layers, init_decoder_others(config, key)


def decoder_layer_keys(config: DecoderConfig, key: jax.Array) -> jax.Array:
    """Return the keys `[num_hidden_layers]` of `init_decoder_layer`."""
    check_config(config)
    numbers = jnp.arange(1, config.num_hidden_layers + 1)
    return jax.vmap(jax.random.fold_in, (None, 0))(as_key("key", key), numbers)


def init_decoder_layer(config: DecoderConfig, key: jax.Array) -> Params:
    """Return the random parameters of one layer."""
    layers, _ = decoder_shapes(config)
    one = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in layers.items()}
    return _draw(config, as_key("key", key), one)


def init_decoder_others(config: DecoderConfig, key: jax.Array) -> Params:
    """Return the random parameters outside the layers."""
    _, others = decoder_shapes(config)
    return _draw(config, jax.random.fold_in(as_key("key", key), 0), others)


def _draw(config: DecoderConfig, key: jax.Array, shapes: Params) -> Params:
    deviation = _parse_settings(config.other_settings).get("initializer_range")
    deviation = 0.02 if deviation is None else deviation

    def draw(key: jax.Array, name: str, a: jax.ShapeDtypeStruct) -> jax.Array:
        if "norm" in name:
            return jnp.full(a.shape, 1 - _FAMILIES[config.model_type].norm_offset, a.dtype)
        if name.endswith("bias"):
            return jnp.zeros(a.shape, a.dtype)
        return (deviation * jax.random.normal(key, a.shape)).astype(a.dtype)

    keys = jax.random.split(key, len(shapes))
    return {name: draw(keys[i], name, a) for i, (name, a) in enumerate(shapes.items())}


class DecoderFunctions(NamedTuple):
    """The functions of a decoder for `effjax.offload_train_step`."""

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]


def decoder_functions(
    config: DecoderConfig,
    *,
    dtype: Any = None,
    attention: str | None = None,
    mlp_chunk_size: int | None = None,
    lora_scale: float = 1.0,
    lora_dropout: float = 0.0,
) -> DecoderFunctions:
    """Return the functions ``(embed, layer, head)`` of a decoder.

    They are the arguments of `effjax.offload_train_step`, with ``weighted_loss=True``::

        init, step = offload_train_step(*decoder_functions(config), tx, weighted_loss=True)

    * ``embed(others, batch, key) -> x`` returns a dict: "hidden" `[N, T, hidden_size]`, and the
      batch's positions and segment ids.
    * ``layer(params, x, key) -> x`` takes the parameters of one layer. With the arrays of a LoRA
      adapter among them, named as by `effjax.convert.load_adapter`, a linear layer computes
      ``W x + lora_scale * B (A dropout(x))``. Without a key, nothing is dropped. With one, a
      dropout of config.json, such as `attention_dropout`, is refused.
    * ``head(others, x, batch, key) -> (loss_sum, weight)`` returns the sum of the cross entropy of
      tokens, times their weights, and the sum of the weights.

    A batch is a dict of arrays `[N, T]`:

    * "tokens": integers in [0, vocab_size);
    * "labels": the next tokens, in [0, vocab_size). They are not shifted. Any other label, such as
      Hugging Face's -100, makes the loss NaN unless its weight is 0: pass
      ``weights = labels != -100``;
    * "weights", optional: the weights of the tokens' losses, numbers or booleans. By default all
      weights are 1;
    * "positions", optional: integers, by default ``arange(T)``. Those of packed sequences begin at
      0 in each document;
    * "segment_ids", optional: integers, by default all equal. Tokens attend to tokens of the same
      id only.

    Args:
        config: the configuration.
        dtype: of the computation. If None, that of `config`.
        attention: the implementation of `effjax.dot_product_attention`.
        mlp_chunk_size: number of positions that the MLP processes at a time; the backward pass
            recomputes each chunk. None means all of them.
        lora_scale: the factor of the adapter, if there is one.
        lora_dropout: the share of the numbers of x that are 0 in the input of A, in [0, 1). The
            others are divided by ``1 - lora_dropout``. Each linear layer drops other numbers, which
            depend on the key only, and with `mlp_chunk_size` on its value.

    Raises:
        TypeError: for a number of another type.
        ValueError: for an unknown dtype or implementation, or a number out of range.
    """
    check_config(config)
    dtype = as_dtype("dtype", config.dtype if dtype is None else dtype)
    check_choice("attention", attention, None, *IMPLEMENTATIONS)
    lora = Lora(
        as_number("lora_scale", lora_scale, math.isfinite, "finite"),
        as_number("lora_dropout", lora_dropout, lambda a: 0 <= a < 1, "in [0, 1)"),
    )
    if mlp_chunk_size is not None:
        mlp_chunk_size = as_integer("mlp_chunk_size", mlp_chunk_size, 1)
    return DecoderFunctions(
        functools.partial(_embed, config, dtype),
        functools.partial(
            apply_layer,
            config,
            functools.partial(attend_to_tokens, config, attention),
            mlp_chunk_size,
            lora,
        ),
        functools.partial(_apply_head, config),
    )


def decoder_logits(config: DecoderConfig, others: Params, hidden: jax.Array) -> jax.Array:
    """Return the logits `[N, T, vocab_size]` of the last layer's output `[N, T, hidden_size]`.

    They are float32, or float64 if computed in float64. For a loss without logits, see
    `decoder_functions`.
    """
    check_config(config)
    check_named_arrays("others", others, ["model.norm.weight", _head_name(config)])
    hidden = as_array("hidden", hidden)
    x = _head_input(config, others, hidden)
    weight = _head_weight(config, others).astype(x.dtype)
    logits = jnp.einsum("ntd,vd->ntv", x, weight, preferred_element_type=accumulation_dtype(x))
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _embed(
    config: DecoderConfig, dtype: Any, others: Params, batch: Params, key: Any = None
) -> Params:
    tokens = batch["tokens"]
    positions = batch.get("positions")
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    weight = others["model.embed_tokens.weight"]
    hidden = _scaled(_take_rows(weight, tokens).astype(dtype), config.embedding_scale)
    x = {"hidden": hidden, "positions": positions}
    if batch.get("segment_ids") is not None:
        x["segment_ids"] = batch["segment_ids"]
    if config.layers_differ:
        # The number of the layer, for each row, because all arrays of x are split into rows.
        x["layer"] = jnp.zeros_like(tokens[:, 0], jnp.int32)
    return x


def _take_rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of a matrix; on a mesh with Explicit axes, sharded as the tokens."""
    if not explicit_axes(tokens):
        return weight[tokens] if weight.dtype.itemsize >= 4 else _take_narrow_rows(weight, tokens)
    spec = PartitionSpec(*explicit_spec(tokens), None)
    sharding = NamedSharding(jax.typeof(tokens).sharding.mesh, spec)
    return weight.at[tokens].get(out_sharding=sharding)


def _take_narrow_rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of a matrix of 16 bits, such that its gradient is summed in float32.

    The gradient of `weight[tokens]` adds row after row in 16 bits, which loses the small terms of
    frequent tokens. Before compute capability 9.0, GPUs add bfloat16 in a loop of compare-and-swap,
    which is slow where many rows collide. Here only the first position of a token in a sequence
    reads the matrix, and the others read the first: their gradients are added to it in float32, and
    then to the matrix one time for each sequence.
    """
    first = jnp.argmax(tokens[:, :, None] == tokens[:, None, :], -1)  # [N, T], without [N, T, T]
    is_first = first == jnp.arange(tokens.shape[1])
    rows = weight.at[jnp.where(is_first, tokens, weight.shape[0])].get(mode="fill", fill_value=0)
    wide = jnp.take_along_axis(rows.astype(jnp.float32), first[..., None], 1)
    return wide.astype(weight.dtype)


def apply_layer(
    config: DecoderConfig,
    attend: Attend,
    mlp_chunk_size: int | None,
    lora: Lora,
    params: Params,
    x: Params,
    key: Any = None,
) -> Params:
    """Apply one layer, with the given attention; see `decoder_functions`."""
    if key is not None:
        check_dropout(config)
    linear = functools.partial(_linear, params, lora, key=key)
    y, x = _apply_attention(config, attend, linear, params, x)
    hidden = x["hidden"] + _scaled(y, config.residual_multiplier)

    def mlp(hidden: jax.Array, chunk: Any) -> jax.Array:
        chunk_key = None if key is None else jax.random.fold_in(key, chunk)
        y = _apply_mlp(config, lora, params, hidden, chunk_key)
        return hidden + _scaled(y, config.residual_multiplier)

    length, size = hidden.shape[1], mlp_chunk_size
    if size is not None and size < length:
        hidden = _map_chunks(jax.checkpoint(mlp, prevent_cse=False), hidden, size)
    else:
        hidden = mlp(hidden, 0)
    if "layer" in x:
        x = {**x, "layer": x["layer"] + 1}
    return {**x, "hidden": hidden}


def _apply_attention(
    config: DecoderConfig, attend: Attend, linear: Linear, params: Params, x: Params
) -> tuple[jax.Array, Params]:
    family = _FAMILIES[config.model_type]
    y = _norm(config, params, family.norms.before_attention, x["hidden"])
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    if family.is_fused:
        qkv = linear("self_attn.qkv_proj", y)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), -1)
    else:
        q, k, v = (linear(f"self_attn.{name}_proj", y) for name in "qkv")
    if family.qk_norm == "all":
        q = _norm(config, params, "self_attn.q_norm", q)
        k = _norm(config, params, "self_attn.k_norm", k)
    q, k, v = (a.reshape(*a.shape[:2], -1, config.head_dim) for a in (q, k, v))
    if family.qk_norm == "head":
        q = _norm(config, params, "self_attn.q_norm", q)
        k = _norm(config, params, "self_attn.k_norm", k)
    rotation = _rotation(config, x, accumulation_dtype(y))
    y, x = attend(_rotate(q, *rotation), _rotate(k, *rotation), v, x)
    y = linear("self_attn.o_proj", y.reshape(*y.shape[:2], -1))
    return _norm(config, params, family.norms.after_attention, y), x


def attend_to_tokens(
    config: DecoderConfig,
    attention: str | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: Params,
) -> tuple[jax.Array, Params]:
    """Attend to the tokens of the same row, in the window of the layer; see `Attend`."""

    def run(window: int | None, *arrays: Any) -> jax.Array:
        q, k, v, segment_ids = arrays
        return dot_product_attention(
            q,
            k,
            v,
            segment_ids=segment_ids,
            window=window,
            scale=config.attention_scale,
            softcap=config.attn_logit_softcapping,
            implementation=attention,
        )

    arrays = q, k, v, x.get("segment_ids")
    windows = [None if w is None or w >= q.shape[1] else w for w in config.windows]
    choices = [*dict.fromkeys(windows)]
    if len(choices) == 1:
        return run(choices[0], *arrays), x
    # Branches with fixed windows, of which one runs: they leave out blocks of pairs, and kernels
    # of libraries support them.
    numbers = jnp.asarray([choices.index(w) for w in windows])
    branches = [functools.partial(run, window) for window in choices]
    return lax.switch(numbers[jnp.max(x["layer"])], branches, *arrays), x


def window_of_layer(config: DecoderConfig, x: Params) -> Any:
    """Return the window of the layer that x comes to, an integer or an array []; None for all."""
    windows = config.windows
    if len({*windows}) == 1:
        return windows[0]
    largest = np.iinfo(np.int32).max
    numbers = jnp.asarray([largest if w is None else w for w in windows], jnp.int32)
    return numbers[jnp.max(x["layer"])]


def _apply_mlp(
    config: DecoderConfig, lora: Lora, params: Params, hidden: jax.Array, key: Any
) -> jax.Array:
    linear = functools.partial(_linear, params, lora, key=key)
    family = _FAMILIES[config.model_type]
    y = _norm(config, params, family.norms.before_mlp, hidden)
    if family.is_fused:
        gate, up = jnp.split(linear("mlp.gate_up_proj", y), 2, -1)
    else:
        gate, up = (linear(f"mlp.{name}_proj", y) for name in ("gate", "up"))
    down = {name: a for name, a in params.items() if name.startswith("mlp.down_proj.")}
    y: Any = _apply_gated(lora, family.activation, down, gate, up, key)
    return _norm(config, params, family.norms.after_mlp, y)


def _silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    sigmoid = jax.nn.sigmoid(x)
    y = x * sigmoid
    return y, sigmoid + y * (1 - sigmoid)


def _gelu_tanh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = jnp.tanh(root * (x + cubic * x**3))
    half = 0.5 * (1 + tanh)
    slope = 0.5 * root * (1 + 3 * cubic * jnp.square(x)) * (1 - jnp.square(tanh))
    return x * half, half + x * slope


# The functions, and those that return their value and their derivative.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (jax.nn.silu, _silu),
    "gelu_pytorch_tanh": (functools.partial(jax.nn.gelu, approximate=True), _gelu_tanh),
}

# y = W h, h = f(gate) * up. For autodiff XLA makes three kernels that read gate or up again: of
# h, dgate and dup. dh = W^T dy does not depend on h, so one kernel can compute all three from gate,
# up and dh. As planned, it moves six arrays [N, T, intermediate_size] instead of ten.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply_gated(
    lora: Lora, activation: str, params: Params, gate: jax.Array, up: jax.Array, key: Any = None
) -> jax.Array:
    """Apply down_proj to f(gate) * up, where f is the activation."""
    h = _ACTIVATIONS[activation][0](gate) * up
    return _linear(params, lora, "mlp.down_proj", h, key)


def _apply_gated_forward(lora, activation, params, gate, up, key):
    y = _apply_gated(lora, activation, params, gate, up, key)
    return y, (params, gate, up, key)


def _apply_gated_backward(lora, activation, residuals, dy):
    params, gate, up, key = residuals

    def apply(params, h):
        return _linear(params, lora, "mlp.down_proj", h, key)

    _, pull_back = jax.vjp(functools.partial(apply, params), jnp.zeros_like(gate))
    (dh,) = pull_back(dy)
    # XLA must not compute h before dh.
    gate, up, dh = lax.optimization_barrier((gate, up, dh))
    wide_gate, wide_up, wide_dh = (a.astype(accumulation_dtype(a)) for a in (gate, up, dh))
    value, slope = _ACTIVATIONS[activation][1](wide_gate)
    h = (value * wide_up).astype(gate.dtype)
    dgate = wide_dh * wide_up * slope
    dup = (wide_dh * value).astype(up.dtype)
    _, pull_back = jax.vjp(lambda params: apply(params, h), params)
    return *pull_back(dy), dgate.astype(gate.dtype), dup, None


_apply_gated.defvjp(_apply_gated_forward, _apply_gated_backward)


def _map_chunks(fun: Callable, x: jax.Array, size: int) -> jax.Array:
    """Apply a function of tokens and a chunk's number to `size` positions of x [N, T, D] each."""
    count = x.shape[1] // size
    whole, rest = x[:, : count * size], x[:, count * size :]
    chunks = jnp.swapaxes(whole.reshape(x.shape[0], count, size, x.shape[2]), 0, 1)
    y = lax.map(lambda chunk: fun(*chunk), (chunks, jnp.arange(count)))
    y = jnp.swapaxes(y, 0, 1).reshape(whole.shape)
    return jnp.concatenate([y, fun(rest, count)], 1) if rest.shape[1] else y


def _apply_head(
    config: DecoderConfig, others: Params, x: Params, batch: Params, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    labels, weights = batch["labels"], batch.get("weights")
    if weights is None:
        losses = token_losses(config, others, x["hidden"], labels)
        return losses.sum(), jnp.asarray(labels.size, losses.dtype)
    losses = token_losses(config, others, x["hidden"], labels, weights != 0)
    weights = weights.astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()


def token_losses(
    config: DecoderConfig,
    others: Params,
    hidden: jax.Array,
    labels: jax.Array,
    where: jax.Array | None = None,
) -> jax.Array:
    """Return the cross entropy [N, T] of the last layer's output, without the logits."""
    return linear_cross_entropy(
        _head_input(config, others, hidden),
        _head_weight(config, others),
        labels,
        where=where,
        softcap=config.final_logit_softcapping,
        transposed=True,
    )


def _head_input(config: DecoderConfig, others: Params, hidden: jax.Array) -> jax.Array:
    """Return the input of the head, divided as its logits would be."""
    return _scaled(_norm(config, others, "model.norm", hidden), 1 / config.logits_scaling)


def _head_weight(config: DecoderConfig, others: Params) -> jax.Array:  # [vocab_size, hidden_size]
    return others[_head_name(config)]


def _head_name(config: DecoderConfig) -> str:
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def _linear(params: Params, lora: Lora, name: str, x: jax.Array, key: Any = None) -> jax.Array:
    def multiply(x: jax.Array, matrix: str) -> jax.Array:
        weight = params[f"{name}.{matrix}"].astype(x.dtype)  # [out, in]
        return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))

    quantized = params.get(f"{name}.weight{CODES}")
    if quantized is None:
        y = multiply(x, "weight")
    else:
        y = quantized_linear(x, Quantized(quantized, params[f"{name}.weight{SCALES}"]))
    bias = params.get(f"{name}.bias")
    if bias is not None:
        y = y + bias.astype(y.dtype)
    if f"{name}.lora_A.weight" in params:
        scale = lora.scale
        if lora.dropout and key is not None:
            key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            x = x * jax.random.bernoulli(key, 1 - lora.dropout, x.shape).astype(x.dtype)
            scale /= 1 - lora.dropout  # here, because x may be narrow
        y = y + scale * multiply(multiply(x, "lora_A.weight"), "lora_B.weight")
    return y


def _norm(config: DecoderConfig, params: Params, name: str | None, x: jax.Array) -> jax.Array:
    """Apply the RMS norm of this name, if there is one."""
    if name is None:
        return x
    weight, offset = params[f"{name}.weight"], _FAMILIES[config.model_type].norm_offset
    wide = at_least_float32(x)
    wide *= lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + config.rms_norm_eps)
    if offset:  # the sum would round in 16 bits
        return ((offset + weight.astype(wide.dtype)) * wide).astype(x.dtype)
    return weight.astype(x.dtype) * wide.astype(x.dtype)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


# Of the R channels of a head that rotate, channels j and R/2 + j form a 2-vector, rotated at
# position t by the angle t * f[j], f[j] = rope_theta^(-2j/R). Llama 3.1 divides a frequency by
# `factor` if it turns less than `low_freq_factor` times in the original length, keeps it if it
# turns more than `high_freq_factor` times, and interpolates between. Layers without rotary
# embeddings have frequencies of 0, so that all layers run one program.


def _rotary_frequencies(config: DecoderConfig, length: int) -> np.ndarray:
    """Return the frequencies in radians per position, float64.

    Args:
        config: the configuration.
        length: the length of a row.

    Returns:
        [L, R/2], or [1, R/2] if those of all layers are equal.
    """
    exponents = np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    frequencies = _scale_frequencies(config, config.rope_theta**-exponents, length)
    rows = [frequencies] * config.num_hidden_layers
    if config.rope_local_base_freq is not None:
        local = config.rope_local_base_freq**-exponents
        rows = [frequencies if window is None else local for window in config.windows]
    if config.no_rope_layers is not None:
        rows = [row * used for row, used in zip(rows, config.no_rope_layers, strict=True)]
    return np.stack(rows if config.layers_differ else rows[:1])


def _scale_frequencies(config: DecoderConfig, frequencies: np.ndarray, length: int) -> np.ndarray:
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, LongRopeScaling):
        is_long = length > scaling.original_max_position_embeddings
        return frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def with_length(config: DecoderConfig, length: int) -> DecoderConfig:
    """Return the configuration whose rotary frequencies are those of rows of this length."""
    scaling = config.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return config
    is_long = length > scaling.original_max_position_embeddings
    factors = scaling.long_factor if is_long else scaling.short_factor
    scaling = dataclasses.replace(scaling, short_factor=factors, long_factor=factors)
    return dataclasses.replace(config, rope_scaling=scaling)


def _rotation(config: DecoderConfig, x: Params, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of the angles [N, T, 1, R/2], times the factor of long rows."""
    positions, factor = x["positions"], 1.0
    table = jnp.asarray(_rotary_frequencies(config, positions.shape[1]), dtype)
    frequencies = table[0] if len(table) == 1 else _take_rows(table, x["layer"])
    frequencies = frequencies.reshape(-1, 1, 1, table.shape[1])
    if isinstance(config.rope_scaling, LongRopeScaling):
        factor = config.rope_scaling.attention_factor
    angles = positions[:, :, None, None].astype(dtype) * frequencies
    return _scaled(jnp.cos(angles), factor), _scaled(jnp.sin(angles), factor)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    width = 2 * cos.shape[-1]
    a, b = jnp.split(x[..., :width].astype(cos.dtype), 2, -1)
    parts = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*parts, x[..., width:]] if width < x.shape[-1] else parts, -1)
