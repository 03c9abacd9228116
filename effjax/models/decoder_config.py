"""Configurations of decoders, from and to a checkpoint's config.json."""

import dataclasses
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from .._files import MAX_COUNT, MAX_NUMBER, MAX_SIZE, read_json_object
from ..ops._common.arguments import (
    as_dtype,
    as_integer,
    as_number,
    check_instance,
    describe,
)


class Norms(NamedTuple):
    """Names of the norms of a layer, before and after attention and the MLP; None for no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


class Experts(NamedTuple):
    """Names of a mixture of experts in the files, and how its router weighs them.

    Attributes:
        module: The module of the experts and of their router, `gate`.
        gate, up, down: The linear layers of an expert.
        size_key, count_key: The keys in config.json of their hidden channels and of their number.
        is_normalized: Whether the weights of the chosen experts always sum to 1.
    """

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    size_key: str = "intermediate_size"
    count_key: str = "num_experts"
    is_normalized: bool = False

    @property
    def matrices(self) -> tuple[str, str, str]:
        """The names of the stacks of matrices of all experts, without `.weight`."""
        gate, up, down = (f"{self.module}.experts.{a}" for a in (self.gate, self.up, self.down))
        return gate, up, down

    @property
    def router(self) -> str:
        """The name of the matrix of the router."""
        return f"{self.module}.gate.weight"


class Family(NamedTuple):
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
        experts: The experts of its MLPs; None for a dense MLP.
    """

    architecture: str
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    has_qkv_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    is_fused: bool = False
    norms: Norms = Norms()
    norm_offset: float = 0.0
    activation: str = "silu"
    activation_key: str = "hidden_act"
    scales_embedding: bool = False
    experts: Experts | None = None


BIASES = "attention_bias", "mlp_bias"
GRANITE_FACTORS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip
SOFT_CAPS = "attn_logit_softcapping", "final_logit_softcapping"
GEMMA_OPTIONS = (
    "attention_bias", "sliding_window", "layer_types", "query_pre_attn_scalar", *SOFT_CAPS,
)  # fmt: skip
EXPERT_OPTIONS = "num_experts", "num_experts_per_tok", "router_aux_loss_coef"
# Keys of config.json that some families have. The others must have the default of the field.
OPTIONS = (
    *BIASES, *GRANITE_FACTORS, *GEMMA_OPTIONS, "no_rope_layers", "partial_rotary_factor",
    "rope_local_base_freq", *EXPERT_OPTIONS, "moe_intermediate_size", "norm_topk_prob",
)  # fmt: skip
# Of these, null in config.json is a value.
NULLABLE = ("sliding_window", *SOFT_CAPS)
SLIDING, FULL = "sliding_attention", "full_attention"  # in `layer_types`
GEMMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "norms": Norms(
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    "norm_offset": 1.0, "activation": "gelu_pytorch_tanh", "activation_key": "hidden_activation",
    "scales_embedding": True,
}  # fmt: skip
FAMILIES = {
    "llama": Family("LlamaForCausalLM", BIASES),
    "mistral": Family(
        "MistralForCausalLM", ("sliding_window",),
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", (), {"num_key_value_heads": 32}, has_qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", ("attention_bias",), {"num_key_value_heads": 32, "head_dim": 128},
        qk_norm="head",
    ),
    "granite": Family(
        "GraniteForCausalLM", (*BIASES, *GRANITE_FACTORS), {"attention_multiplier": 1.0}
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", (*BIASES, "no_rope_layers"),
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", ("attention_bias",), {"rms_norm_eps": 1e-5}, qk_norm="all",
        norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", ("sliding_window", "partial_rotary_factor"), {"rms_norm_eps": 1e-5},
        is_fused=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", GEMMA_OPTIONS,
        GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **GEMMA,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", (*GEMMA_OPTIONS, "rope_local_base_freq"),
        GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        qk_norm="head", **GEMMA,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        ("attention_bias", *EXPERT_OPTIONS, "moe_intermediate_size", "norm_topk_prob"),
        {
            "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "router_aux_loss_coef": 0.001,
        },
        qk_norm="head", experts=Experts(size_key="moe_intermediate_size"),
    ),
    "mixtral": Family(
        "MixtralForCausalLM", ("sliding_window", *EXPERT_OPTIONS),
        {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": 8,
            "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
        },
        experts=Experts(
            "block_sparse_moe", "w1", "w3", "w2", count_key="num_local_experts", is_normalized=True
        ),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", ("attention_bias", *EXPERT_OPTIONS, "norm_topk_prob"),
        {
            "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
        },
        qk_norm="all", experts=Experts(),
    ),
}  # fmt: skip
SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
EXPERT_SIZES = "num_experts", "num_local_experts", "moe_intermediate_size"
# Sizes of random changes in training, of config.json. Generation and evaluation change nothing.
DROPOUTS = "attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Scaling of the rotary frequencies of Llama 3.1 and later; the names are config.json's."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_fields(self)
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
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Scaling of the rotary frequencies of Phi 3 and 4; the names are config.json's.

    Attributes:
        short_factor: divisors of the frequencies, for sequences of at most
            `original_max_position_embeddings` tokens.
        long_factor: those for longer sequences.
        original_max_position_embeddings: the longest sequence with short factors. The length of a
            sequence is its largest position + 1, and in generation grows with each token.
        attention_factor: factor of the rotated queries and keys, of any length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """Scaling of the rotary frequencies by YaRN; the names are config.json's.

    Attributes:
        factor: divisor of the low frequencies.
        original_max_position_embeddings: the length in which turns are counted.
        beta_fast: frequencies of at least this many turns are kept.
        beta_slow: those of at most this many turns are divided, and others interpolated.
        attention_factor: factor of the rotated queries and keys.
        truncate: whether the range of interpolated frequencies is rounded to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"`beta_fast` (={self.beta_fast}) must be at least `beta_slow` (={self.beta_slow})."
            )


RopeScaling = Llama3RopeScaling | LinearRopeScaling | LongRopeScaling | YarnRopeScaling
_SCALINGS: dict[str, type[RopeScaling]] = {
    "llama3": Llama3RopeScaling, "linear": LinearRopeScaling, "longrope": LongRopeScaling,
    "yarn": YarnRopeScaling,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a decoder; the names are those of a checkpoint's config.json.

    Attributes:
        model_type: the family: "llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2",
            "phi3", "gemma2", "gemma3_text", "qwen3_moe", "mixtral" or "olmoe".
        vocab_size, hidden_size, intermediate_size, num_hidden_layers: sizes.
        num_attention_heads: heads of queries; `num_key_value_heads` divides it.
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
        rms_norm_eps: the epsilon of all norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: their scaling. None means none.
        sliding_window: of mistral, phi3, gemma and mixtral: number of positions that a token
            attends to, its own included. None means all earlier ones and itself.
        layer_types: of gemma: "sliding_attention" or "full_attention" for each layer. None means
            windows in all layers, if there is a `sliding_window`.
        no_rope_layers: of smollm3: for each layer 1, or 0 if nothing is rotated in it. None means
            that all rotate.
        partial_rotary_factor: of phi3: the share of the channels of a head that is rotated, the
            first ones.
        rope_local_base_freq: of gemma3_text: base of the rotary frequencies in layers with a
            window, where they are not scaled. None means `rope_theta`.
        attention_bias: of llama, qwen3, granite, smollm3, olmo2, gemma, qwen3_moe and olmoe:
            whether the linear layers of attention have biases. Queries, keys and values of qwen2
            always have them.
        mlp_bias: of llama, granite and smollm3: whether the linear layers of the MLP have biases.
        query_pre_attn_scalar: of gemma: the scores are divided by its root. None means `head_dim`.
        attn_logit_softcapping, final_logit_softcapping: of gemma: bounds c of the scores and of the
            logits, which become c * tanh(s / c). None means no bound.
        embedding_multiplier, residual_multiplier: of granite: factors of the embeddings, and of the
            results of attention and MLP.
        attention_multiplier: of granite: factor of the scores. None means 1 / sqrt(head_dim).
        logits_scaling: of granite: divisor of the logits.
        num_experts, num_experts_per_tok: of qwen3_moe, mixtral and olmoe: the experts of a layer,
            and those that compute for a token, which the router chooses.
        router_aux_loss_coef: of qwen3_moe, mixtral and olmoe: factor of the router's loss, which
            is added to the loss in training. It is least if all experts get equally many tokens.
        moe_intermediate_size: of qwen3_moe: hidden channels of an expert. Those of mixtral and
            olmoe have `intermediate_size`.
        norm_topk_prob: of qwen3_moe and olmoe: whether the weights of the experts of a token are
            divided by their sum. Those of mixtral always are.
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
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    router_aux_loss_coef: float | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    other_settings: str = dataclasses.field(default="{}", repr=False)

    def __post_init__(self) -> None:
        family = _family(self.model_type)
        _check_fields(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` (={self.num_key_value_heads}) must divide "
                f"`num_attention_heads` (={self.num_attention_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`head_dim` (={self.head_dim}) must be even: rotary embeddings rotate pairs."
            )
        check_instance(
            "rope_scaling",
            self.rope_scaling,
            RopeScaling | None,
            "a Llama3RopeScaling, LinearRopeScaling, LongRopeScaling, YarnRopeScaling or None",
        )
        self._check_options(family)
        self._check_rotary()
        self._set("dtype", as_dtype("dtype", self.dtype).name)
        settings = parse_settings(self.other_settings)
        if (deviation := settings.get("initializer_range")) is not None:
            as_number("initializer_range", deviation, lambda a: 0 <= a <= MAX_NUMBER, "at least 0")
        if (positions := settings.get("max_position_embeddings")) is not None:
            _as_count("max_position_embeddings", positions)
        for name in DROPOUTS:
            if settings.get(name) is not None:
                as_number(name, settings[name], lambda a: 0 <= a < 1, "in [0, 1)")

    def _check_options(self, family: Family) -> None:
        """Check and complete the fields that only some families have."""
        neutral = {
            "attention_multiplier": self.head_dim**-0.5,
            "query_pre_attn_scalar": self.head_dim,
            "rope_local_base_freq": self.rope_theta,
        }
        by_layer = {
            "layer_types": FULL if self.sliding_window is None else SLIDING,
            "no_rope_layers": 1,
        }
        for name in family.options:
            if getattr(self, name) is None and name in neutral:
                self._set(name, neutral[name])
            if getattr(self, name) is None and name in by_layer:
                self._set(name, (by_layer[name],) * self.num_hidden_layers)
        self._check_layers("layer_types", (SLIDING, FULL))
        self._check_layers("no_rope_layers", (0, 1))
        if family.experts is not None:
            self._check_experts(family.experts)
        if SLIDING in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError(f"`layer_types` has {SLIDING!r}, which needs a `sliding_window`.")
        for field in dataclasses.fields(self):
            # `to_json` cannot write it: transformers would run another network.
            is_missing = field.name in OPTIONS and field.name not in family.options
            if is_missing and (value := getattr(self, field.name)) != field.default:
                raise ValueError(
                    f"`{field.name}` (={value}) is not supported by {self.model_type}."
                )

    def _check_experts(self, experts: Experts) -> None:
        for name in (*EXPERT_OPTIONS, experts.size_key):
            if getattr(self, name) is None:
                raise ValueError(f"`{name}` (=None) must be a number for {self.model_type}.")
        count, chosen = self.num_experts, self.num_experts_per_tok
        if count is not None and chosen is not None and chosen > count:
            raise ValueError(
                f"`num_experts_per_tok` (={chosen}) must be at most `num_experts` (={count})."
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
        if isinstance(source, Mapping):
            settings = dict(source)
        else:
            path = pathlib.Path(source)
            path = path / "config.json" if path.is_dir() else path
            settings = read_json_object(path, "a config.json")
        try:
            return _parse(settings)
        except (TypeError, ArithmeticError, RecursionError) as error:  # for any content of a file
            raise ValueError(f"config.json is invalid: {error!s:.200}") from error

    def to_json(self) -> dict[str, Any]:
        """Return the content of a config.json, for transformers and `from_json`."""
        family = FAMILIES[self.model_type]
        fields: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings = json.loads(fields.pop("other_settings"))
        for name in set(OPTIONS) - {*family.options}:
            del fields[name]
        if family.experts is not None:
            fields[family.experts.count_key] = fields.pop("num_experts")
        if (scaling := self.rope_scaling) is not None:
            kind = next(kind for kind, form in _SCALINGS.items() if isinstance(scaling, form))
            fields["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(scaling)}
        original = "original_max_position_embeddings"
        if isinstance(scaling, LongRopeScaling | YarnRopeScaling) and (
            self.model_type == "phi3" or original in settings
        ):
            # transformers prefers this key to that of `rope_scaling`.
            settings[original] = scaling.original_max_position_embeddings
        fields["torch_dtype"] = fields.pop("dtype")
        names = {"architectures": [family.architecture], family.activation_key: family.activation}
        return json.loads(json.dumps({**names, **settings, **fields}))  # lists for tuples

    @property
    def has_qkv_bias(self) -> bool:
        """True if the linear layers of queries, keys and values have biases."""
        return self.attention_bias or FAMILIES[self.model_type].has_qkv_bias

    @property
    def fused_projections(self) -> dict[str, tuple[int, ...]]:
        """The rows of each matrix in the linear layers that have several, by name."""
        if not FAMILIES[self.model_type].is_fused:
            return {}
        heads = self.num_attention_heads * self.head_dim
        kv_heads = self.num_key_value_heads * self.head_dim
        return {
            "self_attn.qkv_proj": (heads, kv_heads, kv_heads),
            "mlp.gate_up_proj": (self.intermediate_size, self.intermediate_size),
        }

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
        return root if FAMILIES[self.model_type].scales_embedding else self.embedding_multiplier

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


def _family(model_type: Any) -> Family:
    """Return the family of a `model_type`, or raise ValueError."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(f'"{name}"' for name in FAMILIES)
        hint = ""
        if model_type == "gemma3":
            hint = ' It also reads images; only its text model, "gemma3_text", is supported.'
        raise ValueError(f"`model_type` (={model_type!r:.80}) must be one of {known}.{hint}")
    return FAMILIES[model_type]


def check_dropout(config: DecoderConfig) -> None:
    """Raise ValueError if training as config.json says needs dropout, which is not supported."""
    settings = parse_settings(config.other_settings)
    for name in DROPOUTS:
        if settings.get(name):
            raise ValueError(
                f"`{name}` (={settings[name]}) of config.json is not supported in training. Set it "
                "to 0 there to train without this dropout; generation never drops."
            )


def parse_settings(text: str) -> dict[str, Any]:
    """Return the object in the JSON text `other_settings`."""
    try:
        settings = json.loads(text)
    except (TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"`other_settings` (={text!r:.80}) must be the JSON text of an object.")
    return settings


def _check_fields(config: Any) -> None:
    """Check the fields of a frozen dataclass that are numbers, lists of numbers or bools.

    NumPy scalars, which `to_json` cannot write, become Python's.
    """
    checks = {int: _as_count, float: _as_positive, bool: _as_bool}
    for name, hint in typing.get_type_hints(type(config)).items():
        value: Any = getattr(config, name)
        kinds = typing.get_args(hint) or (hint,)
        check = next((check for kind, check in checks.items() if kind in kinds), None)
        if check is None or (value is None and type(None) in kinds):
            continue
        if typing.get_origin(hint) is tuple:
            check_instance(name, value, (list, tuple), "a list of numbers")
            value = tuple(check(name, entry) for entry in value or ())
        else:
            value = check(name, value)
        object.__setattr__(config, name, value)


def _as_count(name: str, value: Any) -> int:
    sizes = *SIZES, "num_key_value_heads", "head_dim", *EXPERT_SIZES
    limit = MAX_SIZE if name in sizes else MAX_COUNT
    return as_integer(name, value, 1, limit)


def _as_positive(name: str, value: Any) -> float:
    if name == "router_aux_loss_coef":
        return as_number(name, value, lambda a: 0 <= a <= MAX_NUMBER, "at least 0")
    expected = f"between {1 / MAX_NUMBER:g} and {MAX_NUMBER:g}"
    return as_number(name, value, lambda a: 1 / MAX_NUMBER <= a <= MAX_NUMBER, expected)


def _as_bool(name: str, value: Any) -> bool:
    check_instance(name, value, (bool, np.bool_), "a bool")
    return bool(value)


def _parse(settings: dict[str, Any]) -> DecoderConfig:
    """Return the configuration of the content of a config.json; empties `settings` of its keys."""
    model_type = settings.pop("model_type", None)
    family = _family(model_type)
    if family.experts is not None:  # transformers 4 and 5 write different ones, and read both
        for key in ("num_experts", "num_local_experts"):
            if (count := settings.pop(key, None)) is not None:
                settings["num_experts"] = _as_count(key, count)
    _refuse_unsupported(model_type, settings)
    fields: dict[str, Any] = {"model_type": model_type}
    for name in SIZES:
        if name not in settings:
            raise ValueError(f"config.json lacks `{name}`.")
        fields[name] = _as_count(name, settings.pop(name))
    heads = fields["num_attention_heads"]
    # null means the default of the family, except for a key of `NULLABLE`.
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
    written = "architectures", "hidden_act", "hidden_activation"  # by `to_json`
    for name in ("num_key_value_heads", "head_dim", "dtype", "torch_dtype", *names, *written):
        settings.pop(name, None)
    return DecoderConfig(**fields, other_settings=json.dumps(settings, sort_keys=True))


def _parse_dtype(settings: Mapping[str, Any]) -> Any:
    """Return the dtype of config.json: "bfloat16" also of "torch.bfloat16"."""
    # "auto", as no dtype, leaves it to the reader of the weights: float32 holds any of them.
    dtype = settings.get("dtype", settings.get("torch_dtype"))
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    return "float32" if dtype in (None, "auto") else dtype


def _default_layers(model_type: str, count: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for each layer that config.json may lack."""
    # As transformers fills them in: each fourth layer of SmolLM3 rotates nothing, and each second
    # one of Gemma 2 and sixth one of Gemma 3 attends to all tokens.
    if model_type == "smollm3":
        every = as_integer("no_rope_layer_interval", values.get("no_rope_layer_interval", 4), 1)
        return {"no_rope_layers": [int((i + 1) % every != 0) for i in range(count)]}
    if model_type.startswith("gemma"):
        every = 2
        if model_type == "gemma3_text":
            every = as_integer("sliding_window_pattern", values.get("sliding_window_pattern", 6), 1)
        return {"layer_types": [SLIDING if (i + 1) % every else FULL for i in range(count)]}
    return {}


def _parse_rope(family: Family, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary embeddings, from the keys of transformers 4 or 5."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.pop(name, None)
        if not isinstance(value, Mapping | None):
            raise ValueError(f"`{name}` of config.json must be an object, not {describe(value)}.")
        rope |= value or {}
    # transformers 4 has these beside the scaling, and transformers 5 within `rope_parameters`.
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
    # Early configurations of Phi 3 name it otherwise.
    if kind == "su" or (kind == "yarn" and family.architecture == "Phi3ForCausalLM"):
        kind = "longrope"
    fields["rope_scaling"] = _parse_scaling(kind, rope, settings)
    return {name: value for name, value in fields.items() if value is not None}


def _parse_scaling(
    kind: str, rope: dict[str, Any], settings: Mapping[str, Any]
) -> RopeScaling | None:
    """Return the scaling of rotary frequencies of a `rope_type`."""
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(f'"{name}"' for name in ("default", *_SCALINGS))
        raise ValueError(
            f"`rope_type` (={kind!r:.80}) of config.json must be one of {known}; others are not "
            "supported."
        )
    longest: Any = settings.get("max_position_embeddings")
    original: Any = rope.get("original_max_position_embeddings", longest)
    if kind in ("longrope", "yarn"):
        original = settings.get("original_max_position_embeddings", original)
    if kind == "yarn":
        _complete_yarn(rope)
    if kind == "longrope" and rope.get("attention_factor") is None:
        # LongRoPE's sqrt(1 + ln s / ln L) for rows s times as long as the original L: with more
        # tokens, scores must be larger for attention to stay as sharp.
        original = _as_count("original_max_position_embeddings", original)
        factor = rope.get("factor")
        if factor is None:
            factor = _as_positive("max_position_embeddings", longest) / original
        factor = _as_positive("factor", factor)
        root = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        rope["attention_factor"] = root
    rope["original_max_position_embeddings"] = original
    names = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(_SCALINGS[kind])}
    values = {name: rope[name] for name in names if rope.get(name) is not None}
    for name, is_needed in names.items():
        if is_needed and name not in values:
            raise ValueError(f"The {kind} scaling of config.json lacks `{name}`.")
    return _SCALINGS[kind](**values)


def _complete_yarn(rope: dict[str, Any]) -> None:
    """Write the attention factor that config.json may lack; refuse keys that would change it."""
    names = {field.name for field in dataclasses.fields(YarnRopeScaling)}
    names |= {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    if unknown := [name for name in rope if name not in names and rope[name] is not None]:
        raise ValueError(
            f"`{unknown[0]}` (={rope[unknown[0]]!r:.80}) of the yarn scaling of config.json is not "
            "supported."
        )
    if rope.get("attention_factor") is None and rope.get("factor") is not None:
        rope["attention_factor"] = (
            0.1 * math.log(max(_as_positive("factor", rope["factor"]), 1)) + 1
        )


def _refuse_unsupported(model_type: str, settings: dict[str, Any]) -> None:
    """Raise ValueError for settings that would change the network."""
    family = FAMILIES[model_type]
    supported: dict[str, Any] = {
        "hidden_act": family.activation,
        "hidden_activation": family.activation,
        "use_bidirectional_attention": False,
    }
    if model_type.startswith("qwen") or model_type == "smollm3":
        supported["use_sliding_window"] = False
    if family.experts is not None:
        supported |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "clip_qkv": None}
    for name, value in supported.items():
        if settings.get(name) not in (None, value):
            raise ValueError(
                f"`{name}` (={settings[name]!r:.80}) of config.json must be {value!r}; other "
                "values are not supported."
            )
    if (quantized := settings.get("quantization_config")) is not None:
        raise ValueError(
            f"`quantization_config` (={quantized!r:.80}) of config.json is not supported: weights "
            "are read in 16 or 32 bits. Use the model in full precision."
        )
    layers = settings.get("layer_types") or []
    is_full = isinstance(layers, list) and SLIDING not in layers
    if "layer_types" not in family.options and not is_full:
        raise ValueError('`layer_types` of config.json must all be "full_attention".')


def check_config(config: Any) -> None:
    """Raise TypeError unless `config` is a DecoderConfig."""
    check_instance("config", config, DecoderConfig, "a DecoderConfig")
