"""Decoder of the Llama family and its relatives for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..ops._common.arguments import as_array
from ..ops._common.sharding import AnyMesh
from .decoder import (
    Matmul,
    Params,
    decoder_functions,
    decoder_logits,
    init_decoder,
)
from .decoder_config import DecoderConfig
from .scan import ApplyLayers, scan_layers


class Decoder(nnx.Module):
    """Decoder of tokens `[N, T]`, of the families of `DecoderConfig`.

    `layers` and `others` hold the parameters by the names of Hugging Face's checkpoints, as in
    `decoder_shapes`: ``decoder.layers["self_attn.q_proj.weight"]`` is `[L, out, in]`. To load them
    from dicts of arrays, use ``nnx.update(decoder, {"layers": layers, "others": others})``.

    Args:
        config: the configuration.
        dtype, attention, mlp_chunk_size, matmul, mesh: as in `decoder_functions`.
        rngs: for the parameters (stream `params`), which are initialized as in `init_decoder`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: Any = None,
        attention: str | None = None,
        mlp_chunk_size: int | None = None,
        matmul: Matmul | None = None,
        mesh: AnyMesh | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.options = (dtype, attention, mlp_chunk_size, matmul, mesh)
        layers, others = init_decoder(config, rngs.params())
        self.layers, self.others = _as_params(layers), _as_params(others)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        apply_layers: ApplyLayers = scan_layers,
    ) -> jax.Array:
        """Return the logits of the next token at each position.

        Args:
            tokens: integers `[N, T]` in `[0, vocab_size)`.
            positions: integers `[N, T]`, as in `decoder_functions`.
            segment_ids: integers `[N, T]`, as in `decoder_functions`.
            apply_layers: ``apply_layers(layer, params, x, key) -> x``, such as
                `effjax.offload_scan`. By default a loop with all parameters in device memory.

        Returns:
            `[N, T, vocab_size]`, float32 (float64 if computed in float64).
        """
        tokens = as_array("tokens", tokens, jnp.integer)
        batch = {"tokens": tokens, "positions": positions, "segment_ids": segment_ids}
        x, others = self._run_layers(batch, apply_layers)
        return decoder_logits(self.config, others, x["hidden"])

    def loss(
        self, batch: Params, *, apply_layers: ApplyLayers = scan_layers
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum of the tokens' cross entropy, and the sum of the weights.

        No array of all logits exists. `batch` is that of `decoder_functions`, and `apply_layers` as
        in a call.
        """
        x, others = self._run_layers(batch, apply_layers)
        return self.functions.head(others, x, batch)

    @property
    def functions(self) -> Any:
        """The functions ``(embed, layer, head)`` of `decoder_functions`."""
        dtype, attention, mlp_chunk_size, matmul, mesh = self.options
        return decoder_functions(
            self.config, dtype=dtype, attention=attention, mlp_chunk_size=mlp_chunk_size,
            matmul=matmul, mesh=mesh,
        )  # fmt: skip

    def _run_layers(self, batch: Params, apply_layers: ApplyLayers) -> tuple[Any, Params]:
        embed, layer, _ = self.functions
        layers, others = ({n: p[...] for n, p in d.items()} for d in (self.layers, self.others))
        return apply_layers(layer, layers, embed(others, batch), None), others


def _as_params(arrays: Params) -> nnx.Dict:
    return nnx.Dict({name: nnx.Param(array) for name, array in arrays.items()})
