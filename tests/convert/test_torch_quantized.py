"""Values of NF4 in bitsandbytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from effjax.ops.quantize import dequantize, quantize

torch = pytest.importorskip("torch", reason="requires PyTorch")
functional = pytest.importorskip("bitsandbytes.functional", reason="requires bitsandbytes")


def test_same_values_as_bitsandbytes():
    matrix = np.random.default_rng(0).normal(size=(256, 512)).astype("f4")
    tensor = torch.from_numpy(matrix).to(torch.bfloat16)
    packed, state = functional.quantize_4bit(
        tensor, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    want = functional.dequantize_4bit(packed, state).float().numpy()
    ours = quantize(jnp.asarray(tensor.float().numpy(), jnp.bfloat16), "nf4")
    got = dequantize(ours, 512, jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(got, want)
