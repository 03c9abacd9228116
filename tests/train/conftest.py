import jax
import pytest


@pytest.fixture(scope="module")
def compile_fast():
    """For networks of which a few steps are taken: XLA takes longer to compile them than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
