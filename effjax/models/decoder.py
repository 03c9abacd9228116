"""Decoders of the Llama family and its relatives, as functions of arrays.

Parameters have the names and shapes of Hugging Face's checkpoints. `layers` is a flat dict of the
names after ``model.layers.N.``, stacked over the layers: ``"self_attn.q_proj.weight"`` is
``[L, out, in]``. `others` is a flat dict of the names outside the layers.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..ops._common.arguments import (
    as_array,
    as_dtype,
    as_integer,
    as_key,
    as_number,
    check_choice,
    check_named_arrays,
)
from ..ops._common.dtypes import accumulation_dtype, at_least_float32
from ..ops._common.sharding import AnyMesh, explicit_axes, explicit_spec, reshape
from ..ops.attention import IMPLEMENTATIONS, dot_product_attention
from ..ops.cross_entropy import linear_cross_entropy
from ..ops.expert_mlp import Adapted, mix_experts
from ..ops.fp8 import fp8_linear
from ..ops.quantize import FORMATS, Format, Quantized, dequantize, quantized_linear
from ..ops.quantize import quantize as quantize_array
from .decoder_config import (
    FAMILIES,
    DecoderConfig,
    LinearRopeScaling,
    LongRopeScaling,
    YarnRopeScaling,
    check_config,
    check_dropout,
    parse_settings,
)

Params = dict[str, Any]
Matmul = Literal["fp8"]
CODES, SCALES = ".codes", ".scales"  # follow the name of a weight that is quantized
Linear = Callable[[str, jax.Array], jax.Array]  # (name of a linear layer, x)
# ``attend(q, k, v, x) -> (y, x)`` of arrays [N, T, heads, head_dim] and the input of the layer.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Params], tuple[jax.Array, Params]]


class LinearOptions(NamedTuple):
    """Static options of all linear layers of a decoder, ``y = W x + lora_scale * B (A x)``.

    Attributes:
        lora_scale: the factor of the adapters.
        lora_dropout: the share of x that is dropped in the input of A.
        matmul: the products W x; None for those in the dtype of x.
        mesh: that of the tokens of experts, as in `effjax.expert_mlp`.
    """

    lora_scale: float = 1.0
    lora_dropout: float = 0.0
    matmul: Matmul | None = None
    mesh: AnyMesh | None = None


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
        leading axis of layers. The matrices of all experts of a layer are one array, such as
        ``"mlp.experts.gate_proj.weight"`` [L, E, out, in].

    Raises:
        TypeError: for a configuration of another type.
        ValueError: for an unknown way to quantize.
    """
    check_config(config)
    check_choice("quantize", quantize, None, *FORMATS)
    width, hidden = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    family, fused = FAMILIES[config.model_type], config.fused_projections
    experts = family.experts
    if fused:
        linear = {  # [out, in], and whether there is a bias
            "self_attn.qkv_proj": ((sum(fused["self_attn.qkv_proj"]), width), False),
            "self_attn.o_proj": ((width, heads), False),
            "mlp.gate_up_proj": ((sum(fused["mlp.gate_up_proj"]), width), False),
            "mlp.down_proj": ((width, hidden), False),
        }
    else:
        linear = {
            "self_attn.q_proj": ((heads, width), config.has_qkv_bias),
            "self_attn.k_proj": ((kv_heads, width), config.has_qkv_bias),
            "self_attn.v_proj": ((kv_heads, width), config.has_qkv_bias),
            "self_attn.o_proj": ((width, heads), config.attention_bias),
        }
        if experts is None:
            linear |= {
                "mlp.gate_proj": ((hidden, width), config.mlp_bias),
                "mlp.up_proj": ((hidden, width), config.mlp_bias),
                "mlp.down_proj": ((width, hidden), config.mlp_bias),
            }
        else:
            count, hidden = config.num_experts, getattr(config, experts.size_key)
            shapes = (count, hidden, width), (count, hidden, width), (count, width, hidden)
            linear |= {n: (shape, False) for n, shape in zip(experts.matrices, shapes, strict=True)}
    layers: dict[str, Any] = {f"{name}.weight": shape for name, (shape, _) in linear.items()}
    layers |= {f"{name}.bias": shape[:1] for name, (shape, has_bias) in linear.items() if has_bias}
    layers |= {f"{name}.weight": (width,) for name in family.norms if name is not None}
    if family.qk_norm is not None:
        is_all = family.qk_norm == "all"
        layers["self_attn.q_norm.weight"] = (heads if is_all else config.head_dim,)
        layers["self_attn.k_norm.weight"] = (kv_heads if is_all else config.head_dim,)
    if experts is not None:
        layers[experts.router] = (config.num_experts, width)
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
        for name in [f"{name}.weight" for name in linear]:
            a = stacked.pop(name)
            pair = jax.eval_shape(functools.partial(quantize_array, form=quantize), a)
            stacked |= {name + CODES: pair.codes, name + SCALES: pair.scales}
    return stacked, {name: jax.ShapeDtypeStruct(s, dtype) for name, s in others.items()}


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

    All arrays are created whole on the default device. If they do not fit there, call this under
    ``jax.default_device(jax.devices("cpu")[0])``.
    """
    check_config(config)
    key = as_key("key", key)
    layers, others = decoder_shapes(config)
    one = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in layers.items()}
    # Layer i has the key i + 1, and what is outside of the layers the key 0.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(config.num_hidden_layers + 1))
    return jax.vmap(lambda key: _draw(config, key, one))(keys[1:]), _draw(config, keys[0], others)


def _draw(config: DecoderConfig, key: jax.Array, shapes: Params) -> Params:
    deviation = parse_settings(config.other_settings).get("initializer_range")
    deviation = 0.02 if deviation is None else deviation

    def draw(key: jax.Array, name: str, a: jax.ShapeDtypeStruct) -> jax.Array:
        if "norm" in name:
            return jnp.full(a.shape, 1 - FAMILIES[config.model_type].norm_offset, a.dtype)
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
    matmul: Matmul | None = None,
    mesh: AnyMesh | None = None,
) -> DecoderFunctions:
    """Return the functions ``(embed, layer, head)`` of a decoder.

    They are the arguments of `effjax.offload_train_step`, with ``weighted_loss=True``::

        init, step = offload_train_step(*decoder_functions(config), tx, weighted_loss=True)

    * ``embed(others, batch, key) -> x`` returns a dict: "hidden" `[N, T, hidden_size]`, and the
      batch's positions and segment ids, with a `LongRopeScaling` also the lengths of the segments,
      and with experts "routing" `[N, 3, E]`, see `router_loss`.
    * ``layer(params, x, key) -> x`` takes the parameters of one layer. With the arrays of a LoRA
      adapter among them, named as by `effjax.convert.load_adapter`, a linear layer computes
      ``W x + lora_scale * B (A dropout(x))``. Without a key, nothing is dropped. With one, a
      dropout of config.json, such as `attention_dropout`, is refused.
    * ``head(others, x, batch, key) -> (loss_sum, weight)`` returns the sum of the cross entropy of
      tokens, times their weights, and the sum of the weights. With experts, the first sum has
      ``router_aux_loss_coef * router_loss * weight`` more, with the router's loss of this
      microbatch.

    A batch is a dict of arrays `[N, T]`:

    * "tokens": integers in [0, vocab_size);
    * "labels": the next tokens, in [0, vocab_size). They are not shifted. Any other label, such as
      Hugging Face's -100, makes the loss NaN unless its weight is 0: pass
      ``weights = labels != -100``;
    * "weights", optional: the weights of the tokens' losses, numbers or booleans. By default all
      weights are 1;
    * "positions", optional: integers, by default ``arange(T)``. Those of packed sequences begin at
      0 in each document. With a `LongRopeScaling`, the largest of a segment decides its factors;
    * "segment_ids", optional: integers, by default all equal. Tokens attend to tokens of the same
      id only;
    * "mask", optional: numbers or booleans, nonzero for the tokens that count in the router's loss.
      Leave out padding there. By default all count.

    Args:
        config: the configuration.
        dtype: of the computation. If None, that of `config`.
        attention: the implementation of `effjax.dot_product_attention`.
        mlp_chunk_size: number of positions that the MLP processes at a time; the backward pass
            recomputes each chunk. None means all of them. Experts process blocks of tokens anyway.
        lora_scale: the factor of the adapter, if there is one.
        lora_dropout: the share of the numbers of x that are 0 in the input of A, in [0, 1). The
            others are divided by ``1 - lora_dropout``. Each linear layer drops other numbers, which
            depend on the key only, and with `mlp_chunk_size` on its value.
        matmul: "fp8" for products of 8-bit numbers in the linear layers of attention and MLPs, by
            `effjax.fp8_linear`. Experts, adapters, embedding, head and norms are not changed. None
            means products in `dtype`.
        mesh: with experts, the mesh with Auto axes over which batches are divided, as in
            `effjax.expert_mlp`. Its size must divide N * T.

    Raises:
        TypeError: for a number of another type.
        ValueError: for an unknown dtype or implementation, a number out of range, or a
            `mlp_chunk_size` with experts.
    """
    check_config(config)
    dtype = as_dtype("dtype", config.dtype if dtype is None else dtype)
    check_choice("attention", attention, None, *IMPLEMENTATIONS)
    options = LinearOptions(
        as_number("lora_scale", lora_scale, math.isfinite, "finite"),
        as_number("lora_dropout", lora_dropout, lambda a: 0 <= a < 1, "in [0, 1)"),
        check_choice("matmul", matmul, None, *get_args(Matmul)),
        mesh,
    )
    if mlp_chunk_size is not None:
        mlp_chunk_size = as_integer("mlp_chunk_size", mlp_chunk_size, 1)
        if FAMILIES[config.model_type].experts is not None:
            raise ValueError(
                f"`mlp_chunk_size` (={mlp_chunk_size}) must be None for {config.model_type}, whose "
                "experts process blocks of tokens."
            )
    return DecoderFunctions(
        functools.partial(_embed, config, dtype),
        functools.partial(
            apply_layer,
            config,
            functools.partial(attend_to_tokens, config, attention),
            mlp_chunk_size,
            options,
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
    weight = others[_head_name(config)].astype(x.dtype)  # [vocab_size, hidden_size]
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
    if isinstance(config.rope_scaling, LongRopeScaling):
        x["lengths"] = _segment_lengths(positions, x.get("segment_ids"))
    if config.layers_differ:
        # The number of the layer, for each row, because all arrays of x are split into rows.
        x["layer"] = jnp.zeros_like(tokens[:, 0], jnp.int32)
    if config.num_experts is not None:
        if batch.get("mask") is not None:
            x["mask"] = batch["mask"]
        zeros = jnp.zeros_like(tokens[:, 0], at_least_float32(hidden).dtype)[:, None, None]
        x["routing"] = zeros + jnp.zeros((3, config.num_experts), zeros.dtype)
    return x


def _segment_lengths(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Return the largest position + 1 of the segment of each token [N, T]."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.max(positions, 1, keepdims=True) + 1, positions.shape)
    if explicit_axes(positions):  # which the search does not support
        is_same = segment_ids[:, :, None] == segment_ids[:, None, :]
        return jnp.max(positions[:, None, :] + 1, 2, where=is_same, initial=0)

    # Comparing all pairs of tokens stores [N, T, T] on CPUs.
    def of_row(positions: jax.Array, ids: jax.Array) -> jax.Array:
        first = jnp.searchsorted(jnp.sort(ids), ids)  # of each id in the sorted ones
        return jnp.zeros_like(positions).at[first].max(positions + 1)[first]

    return jax.vmap(of_row)(positions, segment_ids)


def _take_rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of a matrix; on a mesh with Explicit axes, sharded as the tokens."""
    if not explicit_axes(tokens):
        return weight[tokens] if weight.dtype.itemsize >= 4 else _take_narrow_rows(weight, tokens)
    spec = PartitionSpec(*explicit_spec(tokens), None)
    sharding = NamedSharding(jax.typeof(tokens).sharding.mesh, spec)
    return weight.at[tokens].get(out_sharding=sharding)


def _take_narrow_rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the rows of a matrix of 16 bits, such that its gradient is summed in float32."""
    # The gradient of `weight[tokens]` adds row after row in 16 bits, which loses the small terms of
    # frequent tokens. Before compute capability 9.0, GPUs add bfloat16 in a loop of compare-and-
    # swap, which is slow where many rows collide. Here only the first position of a token in a
    # sequence reads the matrix, and the others read the first: their gradients are added to it in
    # float32, and then to the matrix one time for each sequence.
    first = jnp.argmax(tokens[:, :, None] == tokens[:, None, :], -1)  # [N, T], without [N, T, T]
    is_first = first == jnp.arange(tokens.shape[1])
    rows = weight.at[jnp.where(is_first, tokens, weight.shape[0])].get(mode="fill", fill_value=0)
    wide = jnp.take_along_axis(rows.astype(jnp.float32), first[..., None], 1)
    return wide.astype(weight.dtype)


def apply_layer(
    config: DecoderConfig,
    attend: Attend,
    mlp_chunk_size: int | None,
    options: LinearOptions,
    params: Params,
    x: Params,
    key: Any = None,
) -> Params:
    """Apply one layer, with the given attention; see `decoder_functions`."""
    if key is not None:
        check_dropout(config)
    linear = functools.partial(_linear, params, options, key=key)
    y, x = _apply_attention(config, attend, linear, params, x)
    hidden = x["hidden"] + _scaled(y, config.residual_multiplier)

    def mlp(hidden: jax.Array, chunk: Any) -> jax.Array:
        chunk_key = None if key is None else jax.random.fold_in(key, chunk)
        y = _apply_mlp(config, options, params, hidden, chunk_key)
        return hidden + _scaled(y, config.residual_multiplier)

    length, size = hidden.shape[1], mlp_chunk_size
    if config.num_experts is not None:
        y, x = _apply_experts(config, options, params, hidden, x, key)
        hidden = hidden + _scaled(y, config.residual_multiplier)
    elif size is not None and size < length:
        # XLA cannot merge the recomputation with the forward pass, which is another loop.
        hidden = _map_chunks(jax.checkpoint(mlp, prevent_cse=False), hidden, size)
    else:
        hidden = mlp(hidden, 0)
    if "layer" in x:
        x = {**x, "layer": x["layer"] + 1}
    return {**x, "hidden": hidden}


def _apply_attention(
    config: DecoderConfig, attend: Attend, linear: Linear, params: Params, x: Params
) -> tuple[jax.Array, Params]:
    family = FAMILIES[config.model_type]
    y = _norm(config, params, family.norms.before_attention, x["hidden"])
    if family.is_fused:
        q, k, v = _split_linear(config, linear, "self_attn.qkv_proj", y)
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
    config: DecoderConfig, options: LinearOptions, params: Params, hidden: jax.Array, key: Any
) -> jax.Array:
    linear = functools.partial(_linear, params, options, key=key)
    family = FAMILIES[config.model_type]
    y = _norm(config, params, family.norms.before_mlp, hidden)
    if family.is_fused:
        gate, up = _split_linear(config, linear, "mlp.gate_up_proj", y)
    else:
        gate, up = (linear(f"mlp.{name}_proj", y) for name in ("gate", "up"))
    down = {name: a for name, a in params.items() if name.startswith("mlp.down_proj.")}
    y: Any = _apply_gated(options, family.activation, down, gate, up, key)
    return _norm(config, params, family.norms.after_mlp, y)


class _ExpertMatrices(NamedTuple):
    """The matrices of an expert, as a function of its parameters for `mix_experts`."""

    config: DecoderConfig
    options: LinearOptions

    def __call__(self, params: Params) -> tuple[jax.Array | Adapted, ...]:
        experts = FAMILIES[self.config.model_type].experts
        assert experts is not None
        width, hidden = self.config.hidden_size, getattr(self.config, experts.size_key)
        sizes = zip(experts.matrices, (width, width, hidden), strict=True)
        return tuple(self._matrix(params, name, size) for name, size in sizes)

    def _matrix(self, params: Params, name: str, size: int) -> jax.Array | Adapted:
        codes, a = params.get(f"{name}.weight{CODES}"), params.get(f"{name}.lora_A.weight")
        if codes is None:
            weight = params[f"{name}.weight"]
        else:
            scales = lax.stop_gradient(params[f"{name}.weight{SCALES}"])
            weight = dequantize(Quantized(codes, scales), size, at_least_float32(scales).dtype)
        if a is None:
            return weight
        return Adapted(weight, a, self.options.lora_scale * params[f"{name}.lora_B.weight"])


def _apply_experts(
    config: DecoderConfig,
    options: LinearOptions,
    params: Params,
    hidden: jax.Array,
    x: Params,
    key: Any,
) -> tuple[jax.Array, Params]:
    """Return what the experts add [N, T, D], and the input of the layer with its new `routing`."""
    family, count = FAMILIES[config.model_type], config.num_experts
    experts = family.experts
    assert experts is not None and count is not None and config.num_experts_per_tok is not None
    stacks = {name: a for name, a in params.items() if ".experts." in name}
    if options.lora_dropout and key is not None and any(".lora_A." in name for name in stacks):
        raise ValueError(
            f"`lora_dropout` (={options.lora_dropout}) must be 0 for adapters of experts, which "
            "have no dropout."
        )
    y = _norm(config, params, family.norms.before_mlp, hidden)
    wide = at_least_float32(y)
    router = params[experts.router].astype(wide.dtype)
    logits = jnp.einsum("ntd,ed->nte", wide, router, precision=lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits, -1)
    weights, choices = lax.top_k(probabilities, config.num_experts_per_tok)
    if experts.is_normalized or config.norm_topk_prob:
        weights /= weights.sum(-1, keepdims=True)
    if "routing" in x:
        is_chosen = (choices[..., None] == jnp.arange(count)).any(2)
        x = {**x, "routing": _add_choices(x, is_chosen, probabilities)}

    def flatten(a: jax.Array) -> jax.Array:
        n, t, size = a.shape
        return reshape(a, (n * t, size), (explicit_spec(a)[0], None))

    mixed = mix_experts(
        flatten(y), flatten(choices), flatten(weights), stacks, _ExpertMatrices(config, options),
        activation=family.activation, transposed=True, mesh=options.mesh,
    )  # fmt: skip
    mixed = reshape(mixed, y.shape, explicit_spec(y))
    return _norm(config, params, family.norms.after_mlp, mixed), x


def _add_choices(x: Params, is_chosen: jax.Array, probabilities: jax.Array) -> jax.Array:
    """Return `routing` with the choices of a layer [N, T, E], see `router_loss`."""
    routing = x["routing"]
    mask = jnp.ones_like(probabilities[..., :1])
    if "mask" in x:
        mask = (x["mask"] != 0).astype(routing.dtype)[..., None]
    choices = jnp.sum(is_chosen * mask, 1)
    shares = jnp.sum(choices, 0) / jnp.maximum(jnp.sum(mask), 1)
    busiest = jnp.maximum(routing[:, 2], shares)
    sums = routing[:, 0] + choices, routing[:, 1] + jnp.sum(probabilities * mask, 1), busiest
    return jnp.stack(sums, 1)


def router_loss(config: DecoderConfig, x: Params) -> tuple[jax.Array, jax.Array]:
    """Return the loss of the router, and the share of a layer's tokens of the busiest expert.

    The loss is that of transformers: E times the sum over experts of f * P, where f is the share of
    tokens that choose the expert, and P its mean probability, over all layers. It is at least the
    number of experts of a token, which it is if all experts get equally many tokens.

    Args:
        config: the configuration, of a model with experts.
        x: the last layer's output. "routing" `[N, 3, E]` has, for each row, the number of choices
            of each expert, the sum of its probabilities, and its largest share of the tokens in a
            layer. It is summed by row, so that it is split into microbatches as the other arrays.
    """
    assert config.num_experts is not None and config.num_experts_per_tok is not None
    choices, probabilities = jnp.sum(x["routing"][:, :2], 0)
    count = jnp.maximum(jnp.sum(choices) / config.num_experts_per_tok, 1)  # of tokens and layers
    loss = config.num_experts * jnp.sum(choices / count * (probabilities / count))
    return loss, lax.stop_gradient(jnp.max(x["routing"][:, 2]))


def _split_linear(
    config: DecoderConfig, linear: Linear, name: str, x: jax.Array
) -> list[jax.Array]:
    """Return the products of each matrix of a fused projection."""
    ends = np.cumsum(config.fused_projections[name])
    return jnp.split(linear(name, x), ends[:-1], -1)


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
    options: LinearOptions,
    activation: str,
    params: Params,
    gate: jax.Array,
    up: jax.Array,
    key: Any = None,
) -> jax.Array:
    """Apply down_proj to f(gate) * up, where f is the activation."""
    h = _ACTIVATIONS[activation][0](gate) * up
    return _linear(params, options, "mlp.down_proj", h, key)


def _apply_gated_forward(options, activation, params, gate, up, key):
    y = _apply_gated(options, activation, params, gate, up, key)
    return y, (params, gate, up, key)


def _apply_gated_backward(options, activation, residuals, dy):
    params, gate, up, key = residuals

    def apply(params, h):
        return _linear(params, options, "mlp.down_proj", h, key)

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
        loss, weight = losses.sum(), jnp.asarray(labels.size, losses.dtype)
    else:
        losses = token_losses(config, others, x["hidden"], labels, weights != 0)
        weights = weights.astype(losses.dtype)
        loss, weight = (losses * weights).sum(), weights.sum()
    if config.router_aux_loss_coef:
        loss += config.router_aux_loss_coef * weight * router_loss(config, x)[0]
    return loss, weight


def token_losses(
    config: DecoderConfig,
    others: Params,
    hidden: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Return the cross entropy [N, T] of the last layer's output, without the logits."""
    return linear_cross_entropy(
        _head_input(config, others, hidden),
        others[_head_name(config)],
        labels,
        mask=mask,
        softcap=config.final_logit_softcapping,
        transposed=True,
    )


def _head_input(config: DecoderConfig, others: Params, hidden: jax.Array) -> jax.Array:
    # The logits of granite are divided. They are never formed in training, so their input is.
    return _scaled(_norm(config, others, "model.norm", hidden), 1 / config.logits_scaling)


def _head_name(config: DecoderConfig) -> str:
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def _linear(
    params: Params, options: LinearOptions, name: str, x: jax.Array, key: Any = None
) -> jax.Array:
    def multiply(x: jax.Array, matrix: str) -> jax.Array:
        weight = params[f"{name}.{matrix}"].astype(x.dtype)  # [out, in]
        return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))

    quantized = params.get(f"{name}.weight{CODES}")
    if quantized is not None and options.matmul is not None:
        raise ValueError(f"`matmul` (={options.matmul!r}) must be None for quantized weights.")
    if options.matmul == "fp8":
        y = fp8_linear(x, params[f"{name}.weight"], transposed=True)
    elif quantized is None:
        y = multiply(x, "weight")
    else:
        y = quantized_linear(x, Quantized(quantized, params[f"{name}.weight{SCALES}"]))
    bias = params.get(f"{name}.bias")
    if bias is not None:
        y = y + bias.astype(y.dtype)
    if f"{name}.lora_A.weight" in params:
        scale = options.lora_scale
        if options.lora_dropout and key is not None:
            # Not hash(name), which differs between the processes of a job.
            key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            x = x * jax.random.bernoulli(key, 1 - options.lora_dropout, x.shape).astype(x.dtype)
            scale /= 1 - options.lora_dropout  # here, because x may be narrow
        y = y + scale * multiply(multiply(x, "lora_A.weight"), "lora_B.weight")
    return y


def _norm(config: DecoderConfig, params: Params, name: str | None, x: jax.Array) -> jax.Array:
    """Apply the RMS norm of this name, if there is one."""
    if name is None:
        return x
    weight, offset = params[f"{name}.weight"], FAMILIES[config.model_type].norm_offset
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
# turns more than `high_freq_factor` times, and interpolates between. YaRN interpolates between the
# channels that turn `beta_fast` and `beta_slow` times. Layers without rotary embeddings have
# frequencies of 0, so that all layers run one program.


def _rotary_frequencies(config: DecoderConfig, is_long: bool = False) -> np.ndarray:
    """Return the frequencies in radians per position, float64.

    Args:
        config: the configuration.
        is_long: whether a `LongRopeScaling` has its long factors.

    Returns:
        [L, R/2], or [1, R/2] if those of all layers are equal.
    """
    # In float64, because positions multiply the error of a power.
    exponents = np.arange(0, config.rotary_dim, 2) / config.rotary_dim
    frequencies = _scale_frequencies(config, config.rope_theta**-exponents, is_long)
    rows = [frequencies] * config.num_hidden_layers
    if config.rope_local_base_freq is not None:
        local = config.rope_local_base_freq**-exponents
        rows = [frequencies if window is None else local for window in config.windows]
    if config.no_rope_layers is not None:
        rows = [row * used for row, used in zip(rows, config.no_rope_layers, strict=True)]
    return np.stack(rows if config.layers_differ else rows[:1])


def _scale_frequencies(config: DecoderConfig, frequencies: np.ndarray, is_long: bool) -> np.ndarray:
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, LongRopeScaling):
        return frequencies / np.array(scaling.long_factor if is_long else scaling.short_factor)
    if isinstance(scaling, YarnRopeScaling):
        kept = 1 - _yarn_ramp(config, scaling)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _attention_factors(config: DecoderConfig) -> np.ndarray:
    """Return the factors of cosines and sines [L, 1], or [1, 1] if layers do not differ."""
    # Layers with a base of their own, and those that do not rotate, are not scaled.
    is_scaled = np.ones(config.num_hidden_layers, bool)
    if config.rope_local_base_freq is not None:
        is_scaled &= [window is None for window in config.windows]
    if config.no_rope_layers is not None:
        is_scaled &= np.array(config.no_rope_layers, bool)
    factors = np.where(is_scaled, getattr(config.rope_scaling, "attention_factor", 1.0), 1.0)
    return factors[: None if config.layers_differ else 1, None]


def _yarn_ramp(config: DecoderConfig, scaling: YarnRopeScaling) -> np.ndarray:
    """Return 0 for frequencies that are kept, to 1 for those that are divided [R/2]."""
    # The channels that turn `beta_fast` and `beta_slow` times in the original length.
    turns = 2 * math.pi * np.array([scaling.beta_fast, scaling.beta_slow])
    logs = np.log(scaling.original_max_position_embeddings / turns)
    first, last = config.rotary_dim * logs / (2 * math.log(config.rope_theta))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    last += 0.001 * (first == last)  # as in transformers
    return np.clip((np.arange(config.rotary_dim // 2) - first) / (last - first), 0, 1)


def _rotation(config: DecoderConfig, x: Params, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of the angles [N, T, 1, R/2], times the attention factor."""

    def of_layer(rows: np.ndarray) -> jax.Array:
        table = jnp.asarray(rows, dtype)
        row = table[0] if len(table) == 1 else _take_rows(table, x["layer"])
        return row.reshape(-1, 1, 1, table.shape[1])

    positions, scaling = x["positions"], config.rope_scaling
    frequencies = of_layer(_rotary_frequencies(config))
    if isinstance(scaling, LongRopeScaling):
        is_long = x["lengths"][:, :, None, None] > scaling.original_max_position_embeddings
        long = of_layer(_rotary_frequencies(config, is_long=True))
        frequencies = jnp.where(is_long, long, frequencies)
    angles = positions[:, :, None, None].astype(dtype) * frequencies
    cos, sin, factors = jnp.cos(angles), jnp.sin(angles), _attention_factors(config)
    if (factors == 1).all():
        return cos, sin
    factor = of_layer(factors)
    return cos * factor, sin * factor


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    width = 2 * cos.shape[-1]
    a, b = jnp.split(x[..., :width].astype(cos.dtype), 2, -1)
    parts = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*parts, x[..., width:]] if width < x.shape[-1] else parts, -1)
