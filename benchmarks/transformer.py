"""A transformer of the GPT family with stacked layer parameters, for the published numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from effjax import linear_cross_entropy
from effjax.models.scan import scan_layers

Params = dict[str, Any]
Layer = Callable[..., jax.Array]

ROTARY_BASE = 10000.0


class TransformerLM(nnx.Module):
    """Decoder of tokens `[N, T]`: embedding, identical pre-norm blocks, RMSNorm, linear head.

    `blocks` is one `TransformerBlock` whose parameters have a leading axis of layers.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers, width, num_heads: of the stack; each head has `width / num_heads` channels.
        mlp_width: hidden channels of the MLP. If None, four times `width`.
        dtype: of the computation. If None, `param_dtype`.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`). `layer_keys` and `init_layer` derive the layers
            from its first key.

    Kernels are initialized from N(0, 1/in), the last kernels of attention and MLP scaled by
    1/√(2·num_layers), the embedding from N(0, 1) and the head from N(0, 0.02²).
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        num_layers: int,
        width: int,
        num_heads: int,
        mlp_width: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.num_layers = num_layers
        dtype = param_dtype if dtype is None else dtype
        options: dict[str, Any] = dict(
            width=width, num_heads=num_heads, mlp_width=mlp_width or 4 * width,
            residual_scale=(2 * num_layers) ** -0.5,
            dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(param_dtype),
        )  # fmt: skip
        self.block_options = tuple(options.items())
        block = nnx.eval_shape(lambda: TransformerBlock(**options, rngs=nnx.Rngs(0)))
        params = jax.vmap(self.init_layer)(self.layer_keys(rngs.params()))
        self.blocks = nnx.merge(nnx.graphdef(block), params)
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        normal = nnx.initializers.normal
        self.embed = nnx.Embed(vocab_size, width, embedding_init=normal(1.0), **dtypes)
        self.norm = nnx.RMSNorm(width, **dtypes)
        self.head = nnx.Linear(
            width, vocab_size, use_bias=False, kernel_init=normal(0.02),
            preferred_element_type=jnp.float32, **dtypes,
        )  # fmt: skip

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits `[N, T, vocab_size]` of the next token at each position."""
        return self.logits(self.features(tokens))

    def features(self, tokens: jax.Array, *, remat: bool = False) -> jax.Array:
        """Return the output of the last layer, `[N, T, width]`, for tokens `[N, T]`."""
        params: Params = nnx.to_pure_dict(nnx.state(self.blocks, nnx.Param))
        return scan_layers(self.layer, params, self.embed(tokens), None, remat=remat)

    @property
    def layer(self) -> Layer:
        """Pure function of one layer, ``layer(params, x) -> x``; a key is ignored."""
        return functools.partial(_apply, nnx.graphdef(self.blocks))

    def layer_keys(self, key: jax.Array) -> jax.Array:
        """Return the keys `[num_layers]` of `init_layer`: ``fold_in(key, i)``."""
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(self.num_layers))

    def init_layer(self, key: jax.Array) -> Params:
        """Return new parameters of one layer; works on an abstract model too."""
        block = TransformerBlock(**dict(self.block_options), rngs=nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(block, nnx.Param))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits `[N, T, vocab_size]` of the last layer's output `[N, T, width]`."""
        return self.head(self.norm(x)).astype(jnp.float32)

    def losses(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the cross entropy `[N, T]` without computing all logits at the same time.

        Args:
            x: `[N, T, width]`, the output of the last layer: see `features`.
            labels: integers `[N, T]`, the next tokens.
        """
        return linear_cross_entropy(self.norm(x), self.head.kernel[...], labels)


class TransformerBlock(nnx.Module):
    """Pre-norm block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``, on `[N, T, width]`.

    The attention is causal, with rotary position embedding of queries and keys. The MLP is linear,
    GELU, linear.

    Args:
        width, num_heads, mlp_width, dtype, param_dtype: as in `TransformerLM`.
        residual_scale: factor of the initial values of the last kernels of attention and MLP.
        rngs: for the parameters (stream `params`).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        mlp_width: int,
        residual_scale: float,
        dtype: Dtype,
        param_dtype: Dtype,
        rngs: nnx.Rngs,
    ):
        self.num_heads = num_heads
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        def linear(before: int, after: int, scale: float = 1.0) -> nnx.Linear:
            init = nnx.initializers.variance_scaling(scale**2, "fan_in", "normal")
            return nnx.Linear(before, after, use_bias=False, kernel_init=init, **dtypes)

        self.norm1 = nnx.RMSNorm(width, **dtypes)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width, residual_scale)
        self.norm2 = nnx.RMSNorm(width, **dtypes)
        self.up = linear(width, mlp_width)
        self.down = linear(mlp_width, width, residual_scale)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `[N, T, width]` for x of the same shape."""
        x = x + self.out(self._attend(self.qkv(self.norm1(x))))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    def _attend(self, qkv: jax.Array) -> jax.Array:
        heads = qkv.reshape(*qkv.shape[:2], 3, self.num_heads, -1)  # [N, T, 3, H, D]
        positions = jnp.arange(qkv.shape[1])
        q, k = rotary(heads[:, :, 0], positions), rotary(heads[:, :, 1], positions)
        attended = jax.nn.dot_product_attention(q, k, heads[:, :, 2], is_causal=True)
        return attended.reshape(*qkv.shape[:2], -1)


# Channels j and D/2 + j of a head form a 2-vector, rotated at position t by the angle
# t · base^(-2j/D).
def rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Apply the rotary position embedding to x `[N, T, H, D]` at `positions` `[T]`."""
    half = x.shape[-1] // 2
    speeds = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(positions.astype(jnp.float32), speeds)[:, None]  # [T, 1, D/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return rotated.astype(x.dtype)


def _apply(graphdef: nnx.GraphDef, params: Params, x: jax.Array, key: None = None) -> jax.Array:
    block: Any = nnx.merge(graphdef, params)
    return block(x)


class LossFunctions(NamedTuple):
    """The mean loss as ``head(others, layers(embed(others, tokens)), tokens)``.

    `layers` applies `layer` with each slice of ``params["blocks"]`` in turn.
    """

    embed: Callable  # (others, tokens) -> x
    layer: Layer  # (params, x) -> x
    head: Callable  # (others, x, tokens) -> loss


def split_loss(model: TransformerLM) -> LossFunctions:
    """Split the loss of a concrete or abstract model, for steps that apply the layers themselves.

    Each of the last T tokens `[N, T + 1]` is predicted from those before it.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: model))
    abstract_blocks = {"blocks": nnx.to_pure_dict(params)["blocks"]}

    def merge(others: Params) -> Any:
        return nnx.merge(graphdef, others | abstract_blocks)

    return LossFunctions(
        lambda others, tokens, key=None: merge(others).embed(tokens[:, :-1]),
        model.layer,
        lambda others, x, tokens, key=None: jnp.mean(merge(others).losses(x, tokens[:, 1:])),
    )
