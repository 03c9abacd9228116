"""How the arrays of two trees are compared."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_same(got, want):
    """The same structure, dtypes and bits, random keys included."""
    _compare(got, want, np.testing.assert_array_equal)


def assert_close(got, want):
    """As `assert_same`, but for the last bits of numbers: what XLA fuses across layers."""
    _compare(got, want, lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6))


def _compare(got, want, assert_numbers):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        exact = not jnp.issubdtype(a.dtype, jnp.floating)
        compare = np.testing.assert_array_equal if exact else assert_numbers
        compare(np.asarray(a), np.asarray(b))


def kinds(tree):
    """The memory kinds of the arrays of a tree."""
    return {a.sharding.memory_kind for a in jax.tree.leaves(tree)}
