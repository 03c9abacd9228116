"""The README's Python blocks run, in order, as one program."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_readme(mesh8):
    text = README.read_text()
    names = {"__name__": "readme"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], README, "exec"), names)

    # The two ways of reducing gradients give the gradient of the whole batch's mean.
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    scale = jnp.linspace(0.5, 2, 4)
    import effjax

    expected = jax.grad(lambda s: jnp.mean(jnp.sin(effjax.sync_batch_norm(x, s)[0])))(scale)
    pmapped = jax.pmap(names["pmapped_step"], "data", in_axes=(None, 0))(scale, x.reshape(8, 2, 4))
    specs = dict(mesh=mesh8, in_specs=(P(), P("data")), out_specs=P())
    mapped = jax.jit(jax.shard_map(names["shard_mapped_step"], **specs))(scale, x)
    np.testing.assert_allclose(pmapped[0], expected, atol=1e-6)
    np.testing.assert_allclose(mapped, expected, atol=1e-6)
