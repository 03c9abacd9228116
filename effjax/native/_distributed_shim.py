"""The key-value store that the processes of a job share.

JAX has no public access to it. Tested with jax 0.10.2 and 0.12.0.1.
"""

from typing import Any

import jax
from jax._src import distributed


class Store:
    """The store of a job whose processes called `jax.distributed.initialize`."""

    def __init__(self, client: Any, process: int):
        self._client, self.process = client, process

    def write(self, name: str, value: str) -> None:
        """Set a value, or replace it."""
        self._client.key_value_set(name, value, allow_overwrite=True)

    def read(self, name: str, timeout_seconds: float) -> str:
        """Wait for a value and return it.

        Raises:
            TimeoutError: no process has set the value in this time.
        """
        try:
            return self._client.blocking_key_value_get(name, int(1000 * timeout_seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(str(error)) from error


def find_store() -> Store | None:
    """Return the store, or None if this is the only process. Starts no backend."""
    state = distributed.global_state
    if state.client is None or state.num_processes in (None, 1):
        return None
    return Store(state.client, state.process_id or 0)
