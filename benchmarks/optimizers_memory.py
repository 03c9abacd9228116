"""Planned memory of the update of a large matrix by optimizer."""

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from effjax.memory import plan
from effjax.optimizers import adamw_8bit, in_float32, stochastic_rounding

from .measure import need_compiler
from .results import Result, Size

TARGET = "h100"
RATE = 1e-3
OPTIMIZERS = {
    "plain bfloat16 moments": lambda: optax.adamw(RATE),
    "effjax float32 moments": lambda: in_float32(optax.adamw(RATE)),
    "effjax float32 moments, stochastic rounding": lambda: optax.chain(
        in_float32(optax.adamw(RATE)), stochastic_rounding(0)
    ),
    "effjax 8-bit moments": lambda: adamw_8bit(RATE),
    "effjax 8-bit moments, stochastic rounding": lambda: optax.chain(
        adamw_8bit(RATE), stochastic_rounding(0)
    ),
}
MATRIX = 151936, 4096


def plan_matrix(shape: tuple[int, int], names: Sequence[str] = tuple(OPTIMIZERS)) -> Result:
    """Plan the update of one matrix in place, with some optimizers."""
    p = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows = []
    for name in names:
        tx = OPTIMIZERS[name]()

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        planned = plan(step, p, jax.eval_shape(tx.init, p), p, target=TARGET)
        temporaries = planned.device.temporaries
        rows.append(
            {
                "name": name,
                "peak_bytes": planned.peak_device_bytes,
                "temp_bytes": temporaries,
                "temp_bytes_per_parameter": round(temporaries / math.prod(shape), 3),
            }
        )
    return Result(
        f"optimizers_matrix_{TARGET}",
        f"the update of a matrix of {shape[0]} × {shape[1]} by optimizer, planned for {TARGET}",
        {"shape": shape, "dtype": "bfloat16", "target": TARGET},
        rows,
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    yield plan_matrix(MATRIX if size == "published" else (4096, 512))
