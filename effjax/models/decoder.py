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
from collections.abc import Callable, Mapping
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
# Keys of config.json that some families have. The others must have the default of the field.
OPTIONS = (*BIASES, "sliding_window", *GRANITE_FACTORS)
# Of these, null in config.json is a value.
NULLABLE = ("sliding_window",)
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
}  # fmt: skip
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
class DecoderConfig:
    """Configuration of a decoder; the names are those of a checkpoint's config.json.

    Attributes:
        model_type: the family: "llama", "mistral", "qwen2", "qwen3" or "granite".
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        num_attention_heads: heads of queries; `num_key_value_heads` divides it.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
        rms_norm_eps: the epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: their scaling. None means none.
        sliding_window: of mistral: number of positions that a token attends to, its own included.
            None means all earlier ones and itself.
        attention_bias: of llama, qwen3 and granite: whether the linear layers of attention have
            biases. Queries, keys and values of qwen2 always have them.
        mlp_bias: of llama and granite: whether the linear layers of the MLP have biases.
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
    rope_scaling: Llama3RopeScaling | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
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
            Llama3RopeScaling | None,
            "a Llama3RopeScaling or None",
        )
        if self.sliding_window is not None:
            self._set("sliding_window", as_integer("sliding_window", self.sliding_window, 1))
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            self._set(name, as_bool(name, getattr(self, name)))
        self._check_options(family)
        self._set("dtype", as_dtype("dtype", self.dtype).name)
        settings = _parse_settings(self.other_settings)
        if (deviation := settings.get("initializer_range")) is not None:
            as_number("initializer_range", deviation, lambda a: 0 <= a < math.inf, "at least 0")
        for name in DROPOUTS:
            if settings.get(name) is not None:
                as_number(name, settings[name], lambda a: 0 <= a < 1, "in [0, 1)")

    def _check_options(self, family: "_Family") -> None:
        """Check and complete the fields that only some families have."""
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            self._set(name, _as_positive(name, getattr(self, name)))
        if "attention_multiplier" in family.options and self.attention_multiplier is None:
            self._set("attention_multiplier", self.head_dim**-0.5)
        if self.attention_multiplier is not None:
            factor = _as_positive("attention_multiplier", self.attention_multiplier)
            self._set("attention_multiplier", factor)
        for field in dataclasses.fields(self):
            # `to_json` cannot write it: transformers would run another network.
            is_missing = field.name in OPTIONS and field.name not in family.options
            if is_missing and (value := getattr(self, field.name)) != field.default:
                raise ValueError(
                    f"`{field.name}` (={value}) is not supported by {self.model_type}."
                )

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
        if self.rope_scaling is not None:
            scaling = dataclasses.asdict(self.rope_scaling)
            fields["rope_scaling"] = {"rope_type": "llama3", **scaling}
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
        return self.attention_multiplier or self.head_dim**-0.5

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings."""
        return self.embedding_multiplier


def _family(model_type: Any) -> _Family:
    """Return the family of a `model_type`, or raise ValueError."""
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(f'"{name}"' for name in _FAMILIES)
        raise ValueError(f"`model_type` (={model_type!r:.80}) must be one of {known}.")
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
    names = "rms_norm_eps", "tie_word_embeddings", *family.options
    for name in names:
        if name in NULLABLE and name in settings:
            fields[name] = settings[name]
        elif name in values:
            fields[name] = values[name]
    fields["dtype"] = _parse_dtype(values)
    for name in ("num_key_value_heads", "head_dim", "dtype", "torch_dtype", *names):
        settings.pop(name, None)
    fields |= _parse_rope(settings)
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


def _parse_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, from the keys of transformers 4 or 5."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.pop(name, None)
        if not isinstance(value, Mapping | None):
            raise ValueError(f"`{name}` of config.json must be an object, not {describe(value)}.")
        rope |= value or {}
    theta = settings.pop("rope_theta", None)
    theta = rope.get("rope_theta", theta)
    fields: dict[str, Any] = {}
    if theta is not None:
        fields["rope_theta"] = theta
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if any(isinstance(value, dict) for value in rope.values()):
        kind = "one for each type of layer"
    if rope.get("partial_rotary_factor", 1) != 1:
        kind = f"{kind} with partial_rotary_factor"
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", settings.get("max_position_embeddings"))
        names = [f.name for f in dataclasses.fields(Llama3RopeScaling)]
        for name in names:
            if rope.get(name) is None:
                raise ValueError(f"The llama3 scaling of config.json lacks `{name}`.")
        fields["rope_scaling"] = Llama3RopeScaling(*(rope[name] for name in names))
    elif kind != "default":
        raise ValueError(
            f'`rope_type` (={kind!r:.80}) of config.json must be "default" or "llama3"; others are '
            "not supported."
        )
    return fields


def _refuse_unsupported(model_type: str, settings: dict[str, Any]) -> None:
    """Raise ValueError for settings that would change the network."""
    family = _FAMILIES[model_type]
    supported: dict[str, Any] = {
        "hidden_act": family.activation,
        "hidden_activation": family.activation,
        "partial_rotary_factor": 1,
        "quantization_config": None,
    }
    if model_type.startswith("qwen"):
        supported["use_sliding_window"] = False
    for name, value in supported.items():
        if settings.get(name) not in (None, value):
            raise ValueError(
                f"`{name}` (={settings[name]!r:.80}) of config.json must be {value!r}; other "
                "values are not supported."
            )
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise ValueError('`layer_types` of config.json must all be "full_attention".')


def check_config(config: Any) -> None:
    """Raise TypeError unless `config` is a DecoderConfig."""
    check_instance("config", config, DecoderConfig, "a DecoderConfig")


def decoder_shapes(config: DecoderConfig) -> tuple[Params, Params]:
    """Return the shapes and dtypes of a decoder's parameters.

    Returns:
        ``(layers, others)`` of `jax.ShapeDtypeStruct` by name. The arrays of `layers` have a
        leading axis of layers.
    """
    check_config(config)
    width, hidden = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    linear = {  # [out, in], and whether there is a bias
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
    family = _FAMILIES[config.model_type]
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
    return stacked, {name: jax.ShapeDtypeStruct(s, dtype) for name, s in others.items()}


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
            functools.partial(_attend, config, attention),
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
    return jnp.einsum("ntd,vd->ntv", x, weight, preferred_element_type=accumulation_dtype(x))


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
    rotation = _rotation(config, x["positions"], accumulation_dtype(y))
    y, x = attend(_rotate(q, *rotation), _rotate(k, *rotation), v, x)
    y = linear("self_attn.o_proj", y.reshape(*y.shape[:2], -1))
    return _norm(config, params, family.norms.after_attention, y), x


def _attend(
    config: DecoderConfig,
    attention: str | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    x: Params,
) -> tuple[jax.Array, Params]:
    y = dot_product_attention(
        q,
        k,
        v,
        segment_ids=x.get("segment_ids"),
        window=config.sliding_window,
        scale=config.attention_scale,
        implementation=attention,
    )
    return y, x


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
    y = _apply_gated(lora, family.activation, down, gate, up, key)
    return _norm(config, params, family.norms.after_mlp, y)


def _silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    sigmoid = jax.nn.sigmoid(x)
    y = x * sigmoid
    return y, sigmoid + y * (1 - sigmoid)


# The functions, and those that return their value and their derivative.
_ACTIVATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (jax.nn.silu, _silu),
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
    hidden = _head_input(config, others, x["hidden"])
    labels, weights = batch["labels"], batch.get("weights")
    kernel = _head_weight(config, others)
    if weights is None:
        losses = linear_cross_entropy(hidden, kernel, labels, transposed=True)
        return losses.sum(), jnp.asarray(labels.size, losses.dtype)
    counted = weights != 0
    losses = linear_cross_entropy(hidden, kernel, labels, where=counted, transposed=True)
    weights = weights.astype(losses.dtype)
    return (losses * weights).sum(), weights.sum()


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

    y = multiply(x, "weight")
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


# Channels j and D/2 + j of a head form a 2-vector, rotated at position t by the angle t * f[j],
# f[j] = rope_theta^(-2j/D). Llama 3.1 divides a frequency by `factor` if it turns less than
# `low_freq_factor` times in the original length, keeps it if it turns more than `high_freq_factor`
# times, and interpolates between.


def _rotary_frequencies(config: DecoderConfig) -> np.ndarray:
    """Return the frequencies [D/2] in radians per position, float64."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _rotation(config: DecoderConfig, positions: jax.Array, dtype: Any) -> tuple:
    """Return the cosine and sine of the angles [N, T, 1, D/2]."""
    frequencies = jnp.asarray(_rotary_frequencies(config), dtype)
    angles = positions[:, :, None, None].astype(dtype) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(cos.dtype), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
