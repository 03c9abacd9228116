"""One of several processes: `python -m tests.distributed.worker PORT COUNT I DEVICES FILE CASE…`.

All run the cases over all devices; the first one writes the results.
"""

import sys

import jax
import numpy as np


def main(port: str, count: str, index: str, devices: str, file: str, *cases: str) -> None:
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(
        f"localhost:{port}", int(count), int(index), heartbeat_timeout_seconds=30
    )
    from tests.distributed.cases import results

    found = results(cases)
    if jax.process_index() == 0:
        np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
