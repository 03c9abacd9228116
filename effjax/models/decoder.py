"""Decoders of the Llama family, configured by a checkpoint's config.json.

Parameters have the names and shapes of Hugging Face's checkpoints. `layers` is a flat dict of the
names after ``model.layers.N.``, stacked over the layers: ``"self_attn.q_proj.weight"`` is
``[L, out, in]``. `others` is a flat dict of the names outside the layers.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

# Defaults of transformers for keys that a config.json may lack, where families differ.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 32},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Scaling of the rotary frequencies of Llama 3.1 and later; the names are config.json's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a decoder; the names are those of a checkpoint's config.json.

    Attributes:
        model_type: "llama", "mistral", "qwen2" or "qwen3".
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        num_attention_heads: heads of queries; `num_key_value_heads` divides it.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
        rms_norm_eps: the epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: their scaling. None means none.
        sliding_window: number of positions that a token attends to, its own included. None means
            all before it.
        attention_bias: whether the linear layers of attention have biases. Queries, keys and values
            of qwen2 always have them.
        mlp_bias: whether the linear layers of the MLP have biases.
        tie_word_embeddings: whether the embedding is also the head.
        dtype: of the parameters.
        other_settings: the other keys of config.json, as JSON text. They do not change the network.
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
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    other_settings: str = dataclasses.field(default="{}", repr=False)

    @classmethod
    def from_json(cls, source: str | os.PathLike | Mapping[str, Any]) -> "DecoderConfig":
        """Return the configuration of a config.json.

        Args:
            source: the file, the folder of a checkpoint, or the content as a dict.

        Raises:
            ValueError: for a network that is not supported, or a missing key.
        """
        if isinstance(source, Mapping):
            settings = dict(source)
        else:
            path = pathlib.Path(source)
            settings = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        return _parse(settings)

    def to_json(self) -> dict[str, Any]:
        """Return the content of a config.json, for transformers and `from_json`."""
        settings = json.loads(self.other_settings)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["other_settings"]
        if self.rope_scaling is not None:
            fields["rope_scaling"] = {
                "rope_type": "llama3",
                **dataclasses.asdict(self.rope_scaling),
            }
        fields["torch_dtype"] = fields.pop("dtype")
        return {
            "architectures": _FAMILIES[self.model_type]["architectures"],
            "hidden_act": "silu",
            **settings,
            **fields,
        }

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.model_type == "qwen3"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the linear layers of queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"


def _parse(settings: dict[str, Any]) -> DecoderConfig:
    """Return the configuration of the content of a config.json."""
    model_type = settings.pop("model_type", None)
    if model_type not in _FAMILIES:
        known = ", ".join(f'"{name}"' for name in _FAMILIES)
        raise ValueError(f"`model_type` (={model_type!r}) of config.json must be one of {known}.")
    family = _FAMILIES[model_type]
    fields: dict[str, Any] = {"model_type": model_type}
    required = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"
    for name in (*required, "num_attention_heads"):
        if name not in settings:
            raise ValueError(f"config.json has no `{name}`.")
        fields[name] = settings.pop(name)
    heads = fields["num_attention_heads"]
    key_value_heads = settings.pop("num_key_value_heads", family.get("num_key_value_heads"))
    fields["num_key_value_heads"] = heads if key_value_heads is None else key_value_heads
    if heads % fields["num_key_value_heads"]:
        raise ValueError(
            f"`num_key_value_heads` (={fields['num_key_value_heads']}) must divide "
            f"`num_attention_heads` (={heads})."
        )
    head_dim = settings.pop("head_dim", family.get("head_dim"))
    fields["head_dim"] = fields["hidden_size"] // heads if head_dim is None else head_dim
    for name in ("rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings"):
        if settings.get(name) is not None:
            fields[name] = settings.pop(name)
    dtypes = [settings.pop(name, None) for name in ("dtype", "torch_dtype")]
    fields["dtype"] = dtypes[0] or dtypes[1] or "float32"
    fields |= _parse_rope(settings)
    if model_type == "mistral":
        fields["sliding_window"] = settings.pop("sliding_window", 4096)
    _refuse_unsupported(model_type, settings)
    for name in ("architectures", "hidden_act"):  # written by `to_json`
        settings.pop(name, None)
    return DecoderConfig(**fields, other_settings=json.dumps(settings, sort_keys=True))


def _parse_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, from the keys of transformers 4 or 5."""
    scaling = settings.pop("rope_scaling", None) or {}
    rope = {**scaling, **(settings.pop("rope_parameters", None) or {})}
    theta = settings.pop("rope_theta", None) or rope.get("rope_theta")
    fields = {} if theta is None else {"rope_theta": float(theta)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        names = [f.name for f in dataclasses.fields(Llama3RopeScaling)]
        missing = [name for name in names if name not in rope]
        if missing:
            raise ValueError(f"The llama3 scaling of config.json has no `{missing[0]}`.")
        fields["rope_scaling"] = Llama3RopeScaling(**{name: rope[name] for name in names})
    elif kind != "default":
        raise ValueError(
            f'`rope_type` (={kind!r}) of config.json must be "default" or "llama3"; others are '
            "not supported."
        )
    return fields


def _refuse_unsupported(model_type: str, settings: dict[str, Any]) -> None:
    """Raise ValueError for settings that would change the network."""
    expected = {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_dropout": 0,
        "partial_rotary_factor": 1,
        "quantization_config": None,
    }
    for name, value in expected.items():
        if name in settings and settings[name] != value and settings[name] is not None:
            raise ValueError(
                f"`{name}` (={settings[name]!r}) of config.json must be {value!r}; other values "
                "are not supported."
            )
    if model_type != "mistral" and "sliding_attention" in (settings.get("layer_types") or ()):
        raise ValueError('`layer_types` of config.json must all be "full_attention".')


def decoder_shapes(config: DecoderConfig) -> tuple[Params, Params]:
    """Return the shapes and dtypes of a decoder's parameters.

    Returns:
        ``(layers, others)`` of `jax.ShapeDtypeStruct` by name. The arrays of `layers` have a
        leading axis of layers.
    """
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
    layers |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (width,))
    if config.has_qk_norm:
        names = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
        layers |= dict.fromkeys(names, (config.head_dim,))
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
