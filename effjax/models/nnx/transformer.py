"""A transformer language model for Flax NNX, whose like layers are one stack of parameters."""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype
from jax import lax
from jax.typing import ArrayLike

from ...ops._common.arguments import (
    as_array,
    as_callable,
    as_dtype,
    as_flag,
    as_integer,
    as_key,
    as_number,
)
from ...ops._common.dtypes import accumulation_dtype
from ...ops.cross_entropy import linear_cross_entropy
from ...ops.dropout import dropout
from ...ops.offload.trees import as_array_tree, count_layers

Params = dict[str, Any]
Layer = Callable[[Params, jax.Array, jax.Array | None], jax.Array]
ApplyLayers = Callable[[Layer, Params, jax.Array, jax.Array | None], jax.Array]

ROTARY_BASE = 10000.0


def scan_layers(
    layer: Layer, params: Params, x: jax.Array, key: jax.Array | None, *, remat: bool = False
) -> jax.Array:
    """Applies a stack of like layers: ``x = layer(params[i], x, key_i)`` for all i, as one loop.

    The key of layer i is ``fold_in(fold_in(key, i), 0)``, as in `effjax.offload_scan`, where the
    second number is that of the microbatch.

    Args:
        layer: ``layer(params, x, key) -> x``, of one layer.
        params: a pytree of arrays `[L, ...]`.
        x: what goes in.
        key: a PRNG key, or None: then layers get None.
        remat: keep the input of each layer for the backward pass, and compute the rest again.

    Returns:
        What the last layer returns.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
    """
    as_callable("layer", layer)
    params, x = as_array_tree("params", params), as_array_tree("x", x)
    key = None if key is None else as_key("key", key)
    num_layers = count_layers(params, "params")
    as_flag("remat", remat)
    # Inside of a loop there is nothing that could undo the recomputation.
    one = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def body(x: jax.Array, at: tuple) -> tuple[jax.Array, None]:
        layer_params, i = at
        k = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), 0)
        return one(layer_params, x, k), None

    return lax.scan(body, x, (params, jnp.arange(num_layers)))[0]


class TransformerLM(nnx.Module):
    """A decoder of tokens `[N, T]`: embedding, like pre-norm blocks, norm, linear head.

    `blocks` is one `TransformerBlock` whose parameters have a leading axis: the layers. What
    applies them is a function, so the same model runs as a loop (`scan_layers`), recomputed
    (``functools.partial(scan_layers, remat=True)``) or offloaded.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers, width, num_heads: of the stack; the heads share the width.
        mlp_width: None is four times `width`.
        use_bias: linear layers with biases and LayerNorm; otherwise none, and RMSNorm.
        dropout_rate: of what each half of a block adds, in [0, 1).
        lora_rank: of the low-rank matrices beside the kernels of the blocks, to be trained alone:
            ``x @ kernel + x @ lora_a @ lora_b``, see ``nnx.LoRALinear``; None: there are none.
        dtype: of the computation; None is `param_dtype`.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`). Its first key is that of the layers, which
            `layer_keys` and `init_layer` make of it.

    Kernels are initialized from N(0, 1/in), those that end a half of a block 1/√(2·num_layers)
    times as large, the embedding from N(0, 1) and the head from N(0, 0.02²).

    Raises:
        ValueError: for an option outside its range.
        TypeError: for one that is of another kind.

    References:
        Vaswani et al. 2017 (arXiv:1706.03762); Xiong et al. 2020 (arXiv:2002.04745); Su et al. 2021
        (arXiv:2104.09864); Zhang and Sennrich 2019 (arXiv:1910.07467); Hu et al. 2021
        (arXiv:2106.09685).
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_width: int | None = None,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        lora_rank: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        vocab_size = as_integer("vocab_size", vocab_size, 1)
        num_layers = as_integer("num_layers", num_layers, 1)
        as_dtype("param_dtype", param_dtype)
        dtype = param_dtype if dtype is None else as_dtype("dtype", dtype)
        options: dict[str, Any] = dict(
            width=width, num_heads=num_heads, mlp_width=mlp_width, use_bias=use_bias,
            dropout_rate=dropout_rate, residual_scale=(2 * num_layers) ** -0.5,
            lora_rank=lora_rank, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype),
        )  # fmt: skip
        self.block_options = tuple(options.items())
        one = nnx.eval_shape(lambda: TransformerBlock(**options, rngs=nnx.Rngs(0)))
        self.num_layers = num_layers
        params = jax.vmap(self.init_layer)(self.layer_keys(rngs.params()))
        self.blocks = nnx.merge(nnx.graphdef(one), params)
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        normal = nnx.initializers.normal
        self.embed = nnx.Embed(vocab_size, width, embedding_init=normal(1.0), **dtypes)
        self.norm = _norm(width, use_bias, dtypes)
        self.head = nnx.Linear(
            width, vocab_size, use_bias=use_bias, kernel_init=normal(0.02),
            preferred_element_type=accumulation_dtype(jnp.zeros((), dtype)), **dtypes,
        )  # fmt: skip

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        key: jax.Array | None = None,
        apply_layers: ApplyLayers = scan_layers,
    ) -> jax.Array:
        """Logits of the next token at each place.

        Args:
            tokens: integers `[N, T]` in `[0, vocab_size)`.
            key: the key of dropout; None leaves it out.
            apply_layers: ``apply_layers(layer, params, x, key) -> x``, by default `scan_layers`.

        Returns:
            `[N, T, vocab_size]`, float32 (float64 where computed so).

        Raises:
            ValueError: if `tokens` are not integers `[N, T]`.
            TypeError: for what is no array, key or function.
        """
        logits = self.logits(self.features(tokens, key=key, apply_layers=apply_layers))
        chex.assert_shape(logits, (*jnp.shape(tokens), self.head.out_features))
        return logits

    def features(
        self,
        tokens: ArrayLike,
        *,
        key: jax.Array | None = None,
        apply_layers: ApplyLayers = scan_layers,
    ) -> jax.Array:
        """What the last layer returns, `[N, T, width]`; arguments and errors as of a call."""
        tokens, key = (
            as_array("tokens", tokens, jnp.generic),
            None if key is None else as_key("key", key),
        )
        as_callable("apply_layers", apply_layers)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"`tokens` must be integers [batch, time], not {tokens.dtype} {tokens.shape}."
            )
        if not tokens.size:
            raise ValueError(f"`tokens` of shape {tokens.shape} must be at least one of each axis.")
        params: Params = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
        x = self.embed(tokens)
        chex.assert_shape(x, (*tokens.shape, self.head.in_features))
        return apply_layers(self.layer, params, x, key)

    @property
    def layer(self) -> Layer:
        """The pure function of one layer, ``layer(params, x, key) -> x``; no dropout without key.

        params are one layer's of `blocks`, as a dict; x is `[N, T, width]` in the model's `dtype`.
        """
        return functools.partial(_apply, nnx.graphdef(self.blocks))

    def layer_keys(self, key: jax.Array) -> jax.Array:
        """The keys `[num_layers]` of `init_layer`: ``fold_in(key, i)``."""
        key = as_key("key", key)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(self.num_layers))

    def init_layer(self, key: jax.Array) -> Params:
        """New parameters of one layer; for an abstract model too."""
        rngs = nnx.Rngs(params=as_key("key", key))
        block = TransformerBlock(**dict(self.block_options), rngs=rngs)
        return nnx.to_pure_dict(nnx.state(block, nnx.Param))

    def logits(self, x: jax.Array) -> jax.Array:
        """`[N, T, vocab_size]` of what the last layer returns, `[N, T, width]`."""
        x = _checked(x, self.head.in_features)
        logits = self.head(self.norm(x))
        return logits.astype(accumulation_dtype(logits))

    def losses(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        """The cross entropy `[N, T]` of labels by ``logits(x)``, which are not made all at once.

        Args:
            x: `[N, T, width]`, what the last layer returns: see `features`.
            labels: integers `[N, T]`, the next tokens.
            **options: `where`, `z_loss` and `chunk_size`, as of `effjax.linear_cross_entropy`.
        """
        x, head = self.norm(_checked(x, self.head.in_features)), self.head
        bias = None if head.bias is None else head.bias[...]
        return linear_cross_entropy(x, head.kernel[...], labels, bias=bias, **options)


class TransformerBlock(nnx.Module):
    """``x += attention(norm(x))``, then ``x += mlp(norm(x))``, on `[N, T, width]`.

    The attention is causal, with rotary position embedding of queries and keys; the MLP is linear,
    GELU, linear.

    Args:
        width, num_heads, mlp_width, use_bias, dropout_rate, lora_rank, dtype, param_dtype: as of
            `TransformerLM`; `dtype` None is x's, promoted with `param_dtype`.
        residual_scale: factor of the initial kernels that end the two halves.
        rngs: for the parameters (stream `params`).

    Raises:
        ValueError: for an option outside its range.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        mlp_width: int | None = None,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        residual_scale: float = 1.0,
        lora_rank: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        width, num_heads = as_integer("width", width, 1), as_integer("num_heads", num_heads, 1)
        mlp_width = 4 * width if mlp_width is None else as_integer("mlp_width", mlp_width, 1)
        as_flag("use_bias", use_bias)
        if width % (2 * num_heads):
            raise ValueError(
                f"`width` (={width}) must be divisible by 2 · `num_heads` (={num_heads}): the "
                "rotary embedding turns pairs of a head's channels."
            )
        as_number("dropout_rate", dropout_rate, lambda rate: 0 <= rate < 1, "in [0, 1)")
        as_number("residual_scale", residual_scale, math.isfinite, "finite")
        if lora_rank is not None:
            lora_rank = as_integer("lora_rank", lora_rank, 1)
        as_dtype("param_dtype", param_dtype)
        if dtype is not None:
            as_dtype("dtype", dtype)
        self.num_heads, self.dropout_rate = num_heads, dropout_rate
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        def linear(before: int, after: int, scale: float = 1.0) -> nnx.Linear:
            init = nnx.initializers.variance_scaling(scale**2, "fan_in", "normal")
            options: dict[str, Any] = dict(use_bias=use_bias, kernel_init=init, **dtypes)
            if lora_rank is None:
                return nnx.Linear(before, after, **options)
            low: dict[str, Any] = dict(lora_dtype=dtype, lora_param_dtype=param_dtype)
            return nnx.LoRALinear(before, after, lora_rank=lora_rank, **low, **options)

        self.norm1 = _norm(width, use_bias, dtypes)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, residual_scale)
        self.norm2 = _norm(width, use_bias, dtypes)
        self.up = linear(width, mlp_width)
        self.down = linear(mlp_width, width, residual_scale)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """`[N, T, width]` of the same; `key` is that of dropout, None leaves it out."""
        x, key = _checked(x, self.qkv.in_features), None if key is None else as_key("key", key)
        x = x + self._drop(self.out(self._attend(self.qkv(self.norm1(x)))), key, 0)
        return x + self._drop(self.down(nnx.gelu(self.up(self.norm2(x)))), key, 1)

    def _attend(self, qkv: jax.Array) -> jax.Array:
        heads = qkv.reshape(*qkv.shape[:2], 3, self.num_heads, -1)  # [N, T, 3, H, D]
        positions = jnp.arange(qkv.shape[1])
        q, k = rotary(heads[:, :, 0], positions), rotary(heads[:, :, 1], positions)
        attended = jax.nn.dot_product_attention(q, k, heads[:, :, 2], is_causal=True)
        chex.assert_equal_shape((q, k, attended))
        return attended.reshape(*qkv.shape[:2], -1)

    def _drop(self, x: jax.Array, key: jax.Array | None, half: int) -> jax.Array:
        if key is None or not self.dropout_rate:
            return x
        return dropout(x, self.dropout_rate, jax.random.fold_in(key, half))


# Channels j and D/2 + j of a head are the two parts of a vector, which at position t is turned by
# the angle t · base^(-2j/D). Turning q and k by the same angle does not change their product, so
# that attention depends on the distance only.
def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of x `[N, T, H, D]` at `positions` `[T]`."""
    chex.assert_rank(x, 4)
    chex.assert_shape(positions, x.shape[1:2])
    wide = accumulation_dtype(x)
    half = x.shape[-1] // 2
    speeds = ROTARY_BASE ** (-jnp.arange(half, dtype=wide) / half)
    angles = jnp.outer(positions.astype(wide), speeds)[:, None]  # [T, 1, D/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return turned.astype(x.dtype)


def _apply(
    graphdef: nnx.GraphDef, params: Params, x: jax.Array, key: jax.Array | None
) -> jax.Array:
    block: Any = nnx.merge(graphdef, params)
    return block(x, key)


def _checked(x: jax.Array, width: int) -> jax.Array:
    x = as_array("x", x)
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"`x` must be of shape [batch, time, {width}], not {x.shape}.")
    return x


def _norm(width: int, use_bias: bool, dtypes: dict[str, Any]) -> Any:
    return (nnx.LayerNorm if use_bias else nnx.RMSNorm)(width, **dtypes)
