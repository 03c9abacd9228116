import pytest


@pytest.fixture(autouse=True)
def as_users_compile(optimized):
    """What is offloaded equals what is in memory to the bit, or nearly so."""
