"""Transformer language model for Flax NNX with stacked layer parameters."""

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

from ...ops._common.arguments import as_array, as_dtype, as_integer, as_key, as_number
from ...ops._common.dtypes import accumulation_dtype
from ...ops.cross_entropy import linear_cross_entropy
from ...ops.dropout import dropout

Params = dict[str, Any]
Layer = Callable[[Params, jax.Array, jax.Array | None], jax.Array]
ApplyLayers = Callable[[Layer, Params, jax.Array, jax.Array | None], jax.Array]

ROTARY_BASE = 10000.0


def scan_layers(
    layer: Layer, params: Params, x: jax.Array, key: jax.Array | None, *, remat: bool = False
) -> jax.Array:
    """Apply a stack of identical layers in one loop: ``x = layer(params[i], x, key_i)``.

    The key of layer i is ``fold_in(fold_in(key, i), 0)``, as in `effjax.offload_scan`, where the
    second number is the microbatch.

    Args:
        layer: ``layer(params, x, key) -> x`` of one layer.
        params: a pytree of arrays `[L, ...]`.
        x: input of the first layer, a pytree of arrays.
        key: a PRNG key, or None to pass None to the layers.
        remat: keep only the input of each layer for the backward pass and recompute the rest.

    Returns:
        The output of the last layer.

    Raises:
        ValueError, TypeError: if `key` is not a key, or the leaves of `params` differ in L.
    """
    key = None if key is None else as_key("key", key)
    num_layers = len(jax.tree.leaves(params)[0])
    # prevent_cse=False: the loop already keeps XLA from undoing the recomputation.
    apply_layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def body(x: jax.Array, layer_input: tuple) -> tuple[jax.Array, None]:
        layer_params, i = layer_input
        k = None if key is None else jax.random.fold_in(jax.random.fold_in(key, i), 0)
        return apply_layer(layer_params, x, k), None

    x = jax.tree.map(jnp.asarray, x)
    return lax.scan(body, x, (params, jnp.arange(num_layers)))[0]


class TransformerLM(nnx.Module):
    """Decoder of tokens `[N, T]`: embedding, identical pre-norm blocks, norm, linear head.

    `blocks` is one `TransformerBlock` whose parameters have a leading axis of layers. A function
    applies the layers, so the same model runs as a loop (`scan_layers`), with recomputation
    (``functools.partial(scan_layers, remat=True)``) or offloaded.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers, width, num_heads: of the stack; each head has `width / num_heads` channels.
        mlp_width: hidden channels of the MLP. If None, four times `width`.
        use_bias: use biases in linear layers, and LayerNorm instead of RMSNorm.
        dropout_rate: of the outputs of attention and MLP, in [0, 1).
        lora_rank: rank of the LoRA matrices of the blocks' kernels, ``x @ kernel + x @ lora_a @
            lora_b`` (see ``nnx.LoRALinear``). If None, LoRA is disabled.
        dtype: of the computation. If None, `param_dtype`.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`). `layer_keys` and `init_layer` derive the layers
            from its first key.

    Kernels are initialized from N(0, 1/in), the last kernels of attention and MLP scaled by
    1/√(2·num_layers), the embedding from N(0, 1) and the head from N(0, 0.02²).

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

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
        self.num_layers = num_layers = as_integer("num_layers", num_layers, 1)
        dtype = param_dtype if dtype is None else dtype
        options: dict[str, Any] = dict(
            width=width, num_heads=num_heads, mlp_width=mlp_width, use_bias=use_bias,
            dropout_rate=dropout_rate, residual_scale=(2 * num_layers) ** -0.5,
            lora_rank=lora_rank, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype),
        )  # fmt: skip
        self.block_options = tuple(options.items())
        block = nnx.eval_shape(lambda: TransformerBlock(**options, rngs=nnx.Rngs(0)))
        params = jax.vmap(self.init_layer)(self.layer_keys(rngs.params()))
        self.blocks = nnx.merge(nnx.graphdef(block), params)
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
        """Return the logits of the next token at each position.

        Args:
            tokens: integers `[N, T]` in `[0, vocab_size)`.
            key: the dropout key. If None, dropout is disabled.
            apply_layers: ``apply_layers(layer, params, x, key) -> x``, by default `scan_layers`.

        Returns:
            `[N, T, vocab_size]`, float32 (float64 if computed in float64).

        Raises:
            ValueError, TypeError, AssertionError: if `tokens` are not integers `[N, T]`, or `key`
                is not a key.
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
        """Return the output of the last layer, `[N, T, width]`; arguments as in a call."""
        tokens = as_array("tokens", tokens, jnp.integer)
        chex.assert_rank(tokens, 2)
        key = None if key is None else as_key("key", key)
        params: Params = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
        x = self.embed(tokens)
        chex.assert_shape(x, (*tokens.shape, self.head.in_features))
        return apply_layers(self.layer, params, x, key)

    @property
    def layer(self) -> Layer:
        """Pure function of one layer, ``layer(params, x, key) -> x``; no dropout without a key.

        `params` is the dict of one layer's parameters in `blocks`; x is `[N, T, width]` in the
        model's `dtype`.
        """
        return functools.partial(_apply, nnx.graphdef(self.blocks))

    def layer_keys(self, key: jax.Array) -> jax.Array:
        """Return the keys `[num_layers]` of `init_layer`: ``fold_in(key, i)``."""
        key = as_key("key", key)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(self.num_layers))

    def init_layer(self, key: jax.Array) -> Params:
        """Return new parameters of one layer; works on an abstract model too."""
        rngs = nnx.Rngs(params=as_key("key", key))
        block = TransformerBlock(**dict(self.block_options), rngs=rngs)
        return nnx.to_pure_dict(nnx.state(block, nnx.Param))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits `[N, T, vocab_size]` of the last layer's output `[N, T, width]`."""
        logits = self.head(self.norm(x))
        return logits.astype(accumulation_dtype(logits))

    def losses(self, x: jax.Array, labels: jax.Array, **options: Any) -> jax.Array:
        """Return the cross entropy `[N, T]` without computing all logits at the same time.

        Args:
            x: `[N, T, width]`, the output of the last layer: see `features`.
            labels: integers `[N, T]`, the next tokens.
            **options: `where`, `z_loss` and `chunk_size` of `effjax.linear_cross_entropy`.
        """
        x, head = self.norm(x), self.head
        bias = None if head.bias is None else head.bias[...]
        return linear_cross_entropy(x, head.kernel[...], labels, bias=bias, **options)


class TransformerBlock(nnx.Module):
    """Pre-norm block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``, on `[N, T, width]`.

    The attention is causal, with rotary position embedding of queries and keys. The MLP is linear,
    GELU, linear.

    Args:
        width, num_heads, mlp_width, use_bias, dropout_rate, lora_rank, param_dtype: as in
            `TransformerLM`.
        dtype: of the computation. If None, x's dtype, promoted with `param_dtype`.
        residual_scale: factor of the initial values of the last kernels of attention and MLP.
        rngs: for the parameters (stream `params`).

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.
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
        if width % (2 * num_heads):
            raise ValueError(
                f"2 · `num_heads` (={num_heads}) must divide `width` (={width}): the rotary "
                "embedding rotates pairs of a head's channels."
            )
        dropout_rate = as_number(
            "dropout_rate", dropout_rate, lambda rate: 0 <= rate < 1, "in [0, 1)"
        )
        residual_scale = as_number("residual_scale", residual_scale, math.isfinite, "finite")
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
        """Return `[N, T, width]` for x of the same shape; dropout requires `key`."""
        chex.assert_shape(x, (None, None, self.qkv.in_features))
        key = None if key is None else as_key("key", key)
        x = x + self._drop(self.out(self._attend(self.qkv(self.norm1(x)))), key, 0)
        return x + self._drop(self.down(nnx.gelu(self.up(self.norm2(x)))), key, 1)

    def _attend(self, qkv: jax.Array) -> jax.Array:
        heads = qkv.reshape(*qkv.shape[:2], 3, self.num_heads, -1)  # [N, T, 3, H, D]
        positions = jnp.arange(qkv.shape[1])
        q, k = rotary(heads[:, :, 0], positions), rotary(heads[:, :, 1], positions)
        attended = jax.nn.dot_product_attention(q, k, heads[:, :, 2], is_causal=True)
        chex.assert_equal_shape((q, k, attended))
        return attended.reshape(*qkv.shape[:2], -1)

    def _drop(self, x: jax.Array, key: jax.Array | None, branch: int) -> jax.Array:
        if key is None or not self.dropout_rate:
            return x
        return dropout(x, self.dropout_rate, jax.random.fold_in(key, branch))


# Channels j and D/2 + j of a head form a 2-vector, rotated at position t by the angle
# t · base^(-2j/D). Rotating q and k by the same angle keeps their product, so attention depends on
# the difference of positions only.
def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to x `[N, T, H, D]` at `positions` `[T]`."""
    chex.assert_rank(x, 4)
    chex.assert_shape(positions, x.shape[1:2])
    wide = accumulation_dtype(x)
    half = x.shape[-1] // 2
    speeds = ROTARY_BASE ** (-jnp.arange(half, dtype=wide) / half)
    angles = jnp.outer(positions.astype(wide), speeds)[:, None]  # [T, 1, D/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(wide), x[..., half:].astype(wide)
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return rotated.astype(x.dtype)


def _apply(
    graphdef: nnx.GraphDef, params: Params, x: jax.Array, key: jax.Array | None
) -> jax.Array:
    block: Any = nnx.merge(graphdef, params)
    return block(x, key)


def _norm(width: int, use_bias: bool, dtypes: dict[str, Any]) -> Any:
    return (nnx.LayerNorm if use_bias else nnx.RMSNorm)(width, **dtypes)
