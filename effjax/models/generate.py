"""Text generation with a decoder and a cache of its keys and values."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..ops._common.arguments import (
    as_array,
    as_dtype,
    as_integer,
    as_key,
    as_number,
    check_named_arrays,
)
from ..ops._common.dtypes import accumulation_dtype
from ..ops.offload import offload_jit, offload_scan
from ..ops.offload.placement import Space, space_of
from .decoder import (
    Attend,
    LinearOptions,
    Params,
    apply_layer,
    attend_to_tokens,
    check_layers,
    decoder_functions,
    decoder_logits,
    decoder_shapes,
    window_of_layer,
)
from .decoder_config import DecoderConfig, LongRopeScaling, check_config

CACHES = "keys_cache", "values_cache"  # names in the input of a layer


class Generation(NamedTuple):
    """Generated tokens.

    Attributes:
        tokens: integers `[N, max_new_tokens]`. Zeros follow a stop token.
        lengths: integers `[N]`, the number of generated tokens of each row, with its stop token.
    """

    tokens: jax.Array
    lengths: jax.Array


class Options(NamedTuple):
    """Static options of `generate`, from `check_options`."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: tuple[int, ...]
    dtype: Any
    lora_scale: float


class State(NamedTuple):
    """State of a generation between two tokens.

    The token at position t of a row is in slot t of its caches, which have S slots.
    """

    tokens: jax.Array  # [N, max_new_tokens]
    count: jax.Array  # [], the number of generated tokens of each row
    lengths: jax.Array  # [N], as in `Generation`
    is_done: jax.Array  # [N]
    prompt_lengths: jax.Array  # [N]
    keys: jax.Array  # [N], PRNG keys
    caches: Params  # of `CACHES`: [L, N, S, kv_heads, head_dim]
    prompts: Any  # [N, T], only if the frequencies of a row can change while it grows


def generate(
    config: DecoderConfig,
    layers: Params,
    others: Params,
    tokens: jax.Array,
    *,
    max_new_tokens: int,
    lengths: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: jax.Array | None = None,
    dtype: Any = None,
    lora_scale: float = 1.0,
) -> Generation:
    """Continue prompts by tokens that a decoder predicts.

    Runs the prompts once, and then the layers on one token of each row at a time, with the keys and
    values of all tokens before it in a cache. The cache takes 2 × L × N × (T + max_new_tokens) ×
    num_key_value_heads × head_dim numbers on the device. Generation ends early if all rows have
    reached a stop token. With a `LongRopeScaling`, a row that grows beyond the original length is
    computed again, with the long factors.

    The function is compiled for each shape and combination of options. It can be called inside
    ``jax.jit``; for layers in host memory, inside `effjax.offload_jit`.

    Args:
        config: the configuration.
        layers: the parameters of the layers, as in `decoder_shapes`: all on the device, or all in
            host memory, from which they are loaded one layer at a time, again for each token.
        others: the other parameters, on the device.
        tokens: the prompts, integers `[N, T]` in [0, vocab_size). Shorter ones are padded at the
            end with any tokens.
        max_new_tokens: the number of tokens to generate.
        lengths: integers `[N]` in [1, T], the lengths of the prompts. By default all are T.
        temperature: divisor of the logits. At 0, the most probable token is taken, and the
            other options of sampling have no effect.
        top_k: sample from this many most probable tokens. None means all.
        top_p: sample from the smallest set of most probable tokens whose probabilities sum to at
            least this number, after `top_k`. None means all.
        stop_tokens: tokens that end a row.
        key: a PRNG key. Needed unless the temperature is 0. The tokens of row i depend on the key,
            i and the prompt of the row only, up to rounding.
        dtype: dtype of the computation and the cache. If None, that of `config`.
        lora_scale: the factor of the LoRA adapter that `layers` may contain, as in
            `decoder_functions`.

    Raises:
        TypeError: for arguments of a wrong type.
        ValueError: for options outside their ranges, mismatched shapes, and a missing key.
    """
    options = check_options(
        config, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop_tokens=stop_tokens, dtype=dtype, lora_scale=lora_scale,
    )  # fmt: skip
    tokens = as_array("tokens", tokens, jnp.integer)
    if tokens.ndim != 2 or not tokens.size:
        raise ValueError(f"`tokens` of shape {tokens.shape} must be [N, T], and not empty.")
    if lengths is None:
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1])
    lengths = as_array("lengths", lengths, jnp.integer)
    if lengths.shape != tokens.shape[:1]:
        raise ValueError(f"`lengths` of shape {lengths.shape} must be {tokens.shape[:1]}.")
    if options.temperature and key is None:
        raise ValueError("A positive `temperature` needs a `key`, such as jax.random.key(0).")
    key = as_key("key", jax.random.key(0) if key is None else key)
    check_layers(config, layers)
    check_named_arrays("others", others, decoder_shapes(config)[1])
    return _compile(config, options)(layers, others, tokens, lengths, key)


def check_options(
    config: DecoderConfig,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    dtype: Any = None,
    lora_scale: float = 1.0,
) -> Options:
    """Return the options of `generate`, or raise ValueError or TypeError."""
    check_config(config)
    return Options(
        as_integer("max_new_tokens", max_new_tokens, 1),
        as_number("temperature", temperature, lambda t: 0 <= t < math.inf, "finite, at least 0"),
        None if top_k is None else as_integer("top_k", top_k, 1),
        None if top_p is None else as_number("top_p", top_p, lambda p: 0 < p <= 1, "in (0, 1]"),
        tuple(as_integer("stop_tokens", token, 0) for token in stop_tokens),
        as_dtype("dtype", config.dtype if dtype is None else dtype),
        as_number("lora_scale", lora_scale, math.isfinite, "finite"),
    )


@functools.lru_cache(maxsize=16)
def _compile(config: DecoderConfig, options: Options) -> Callable[..., Generation]:
    """Return the compiled function of arrays. Inside of a trace, it is not compiled separately."""

    def run(layers, others, tokens, lengths, key) -> Generation:
        # The longest row needs a slot for each token of its prompt and each new one.
        num_slots = tokens.shape[1] + options.max_new_tokens
        state = start(config, options, num_slots, layers, others, tokens, lengths, key)
        state = lax.while_loop(
            lambda state: (state.count < options.max_new_tokens) & ~state.is_done.all(),
            lambda state: advance(config, options, state, layers, others),
            state,
        )
        return Generation(state.tokens, state.lengths)

    return offload_jit(run, donate=False)


def start(
    config: DecoderConfig,
    options: Options,
    num_slots: int,
    layers: Params,
    others: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
) -> State:
    """Run the prompts [N, T], and generate the first token of each row."""
    n, t = tokens.shape
    shape = config.num_hidden_layers, n, num_slots, config.num_key_value_heads, config.head_dim
    state = State(
        tokens=jnp.zeros((n, options.max_new_tokens), jnp.int32),
        count=jnp.int32(0),
        lengths=jnp.zeros(n, jnp.int32),
        is_done=jnp.zeros(n, bool),
        prompt_lengths=lengths,
        keys=jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n)),
        caches={name: jnp.zeros(shape, options.dtype) for name in CACHES},
        prompts=tokens if num_slots > _longest_short_row(config) else None,
    )
    # Keys and values of padding are written too. A generated token overwrites them before any
    # token attends to its slot.
    positions = jnp.broadcast_to(jnp.arange(t), (n, t))
    attend = functools.partial(_attend_to_prompts, config)
    x, caches = _run_layers(
        config, options, attend, state.caches, layers, others, tokens, positions, lengths
    )
    state = state._replace(caches=caches)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], 1)
    return _append(options, state, decoder_logits(config, others, last)[:, 0])


def advance(
    config: DecoderConfig, options: Options, state: State, layers: Params, others: Params
) -> State:
    """Generate the next token of each row."""
    if state.prompts is not None:
        state = _rotate_again(config, options, state, layers, others)
    last = lax.dynamic_index_in_dim(state.tokens, state.count - 1, 1)
    positions = (state.prompt_lengths + state.count - 1)[:, None]
    attend = functools.partial(_attend_with_cache, config)
    x, caches = _run_layers(config, options, attend, state.caches, layers, others, last, positions)
    state = state._replace(caches=caches)
    return _append(options, state, decoder_logits(config, others, x)[:, 0])


def _longest_short_row(config: DecoderConfig) -> float:
    """Return the number of tokens from which on a row has other frequencies."""
    scaling = config.rope_scaling
    is_long = isinstance(scaling, LongRopeScaling)
    return scaling.original_max_position_embeddings if is_long else math.inf


def _rotate_again(
    config: DecoderConfig, options: Options, state: State, layers: Params, others: Params
) -> State:
    """Compute the caches of rows anew whose frequencies change with their last token."""
    # As Phi 3 of transformers does. One row at a time: its neighbors need not change theirs, and
    # the activations of so many tokens of all rows may not fit.
    size = int(_longest_short_row(config))

    def run(carry: tuple[jax.Array, Params]) -> tuple[jax.Array, Params]:
        changes, caches = carry
        row, slots = jnp.argmax(changes), jnp.arange(size)
        length = state.prompt_lengths[row]
        prompt, new = state.prompts[row], state.tokens[row]
        tokens = jnp.where(
            slots < length,
            prompt[jnp.minimum(slots, len(prompt) - 1)],
            new[jnp.clip(slots - length, 0, len(new) - 1)],
        )
        one = {name: lax.dynamic_slice_in_dim(a, row, 1, 1) for name, a in caches.items()}
        attend = functools.partial(_attend_to_prompts, config)
        _, one = _run_layers(
            config, options, attend, one, layers, others, tokens[None], slots[None],
            jnp.full(1, size + 1),
        )  # fmt: skip
        caches = {
            name: lax.dynamic_update_slice_in_dim(a, one[name], row, 1)
            for name, a in caches.items()
        }
        return changes.at[row].set(False), caches

    changes = (state.prompt_lengths + state.count == size + 1) & ~state.is_done
    _, caches = lax.while_loop(lambda carry: carry[0].any(), run, (changes, state.caches))
    return state._replace(caches=caches)


def _attend_to_prompts(
    config: DecoderConfig, q: jax.Array, k: jax.Array, v: jax.Array, x: Params
) -> tuple[jax.Array, Params]:
    y, x = attend_to_tokens(config, None, q, k, v, x)
    return y, _write_caches(x, k, v)


def _attend_with_cache(
    config: DecoderConfig, q: jax.Array, k: jax.Array, v: jax.Array, x: Params
) -> tuple[jax.Array, Params]:
    x = _write_caches(x, k, v)
    keys, values = (
        lax.dynamic_index_in_dim(x[name], x["layer"], 0, keepdims=False) for name in CACHES
    )
    y = attend_to_cache(
        q, keys, values, x["positions"], window=window_of_layer(config, x),
        scale=config.attention_scale, softcap=config.attn_logit_softcapping,
    )  # fmt: skip
    return y, x


def _run_layers(
    config: DecoderConfig,
    options: Options,
    attend: Attend,
    caches: Params,
    layers: Params,
    others: Params,
    tokens: jax.Array,
    positions: jax.Array,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, Params]:
    """Return the last layer's output [N, T, hidden_size], and the new caches.

    `lengths` [N] are those of the rows, by default up to the last position.
    """
    embed = decoder_functions(config, dtype=options.dtype).embed
    x = embed(others, {"tokens": tokens, "positions": positions})
    x.pop("routing", None)  # for the loss only
    if lengths is not None and "lengths" in x:
        x["lengths"] = jnp.broadcast_to(lengths[:, None], tokens.shape)
    # The caches are carried from layer to layer, so that each layer updates them in place.
    x |= {"layer": jnp.int32(0), **caches}

    def layer(params: Params, x: Params, key: Any = None) -> Params:
        return apply_layer(config, attend, None, LinearOptions(options.lora_scale), params, x)

    if space_of(jax.tree.leaves(layers)[0]) == Space.Host:
        x = offload_scan(layer, layers, x)
    else:
        x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, layers)
    return x["hidden"], {name: x[name] for name in CACHES}


def _write_caches(x: Params, k: jax.Array, v: jax.Array) -> Params:
    """Write keys and values [N, T, kv_heads, head_dim] to the slots of their positions."""
    at = x["layer"], jnp.arange(len(k))[:, None], x["positions"]
    written = zip(CACHES, (k, v), strict=True)
    return x | {name: x[name].at[at].set(a, unique_indices=True) for name, a in written}


def attend_to_cache(
    q: jax.Array,  # [N, T, H, D]
    k: jax.Array,  # [N, S, K, D]
    v: jax.Array,
    positions: jax.Array,  # [N, T], of the queries
    *,
    window: Any,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Return the attention [N, T, H, D] of queries to the slots up to their positions.

    `window`, an integer or an array [], limits them to the last slots. None means all.
    """
    # `dot_product_attention` has no positions by row, and the scores of a single query are few.
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    wide = accumulation_dtype(q)
    scores = jnp.einsum("ntkgd,nskd->nkgts", grouped, k, preferred_element_type=wide)
    scores *= scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = positions[:, :, None] - jnp.arange(k.shape[1])  # [N, T, S]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    y = jnp.einsum("nkgts,nskd->ntkgd", weights, v, preferred_element_type=wide)
    return y.reshape(q.shape).astype(q.dtype)


def _append(options: Options, state: State, logits: jax.Array) -> State:
    """Sample a token of each row from the logits [N, vocab_size] and append it."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.count)
    sampled = sample(options, logits, keys)
    sampled = jnp.where(state.is_done, 0, sampled).astype(state.tokens.dtype)
    stops = jnp.isin(sampled, jnp.asarray(options.stop_tokens, sampled.dtype))
    return state._replace(
        tokens=lax.dynamic_update_index_in_dim(state.tokens, sampled, state.count, 1),
        count=state.count + 1,
        lengths=state.lengths + ~state.is_done,
        is_done=state.is_done | stops,
    )


def sample(options: Options, logits: jax.Array, keys: jax.Array) -> jax.Array:
    """Return a token of each row, given logits [N, vocab_size] and PRNG keys [N]."""
    if options.temperature == 0:
        return jnp.argmax(logits, -1)
    draw = jax.vmap(jax.random.categorical)
    # Without the subtraction, a tiny temperature makes the largest logits infinite.
    logits -= jnp.max(logits, -1, keepdims=True)
    logits /= max(options.temperature, float(jnp.finfo(logits.dtype).tiny))
    if options.top_k is None and options.top_p is None:
        return draw(keys, logits)
    size = logits.shape[1]
    logits, tokens = lax.top_k(logits, min(options.top_k or size, size))
    if options.top_p is not None:
        probabilities = jax.nn.softmax(logits, -1)
        before = jnp.cumsum(probabilities, -1) - probabilities  # the sum of all more probable ones
        logits = jnp.where(before < options.top_p, logits, -jnp.inf)
    return jnp.take_along_axis(tokens, draw(keys, logits)[:, None], 1)[:, 0]
