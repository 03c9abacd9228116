"""Test loss of a small language model of bytes, trained with low-precision optimizers.

The models differ only in the dtype of their parameters and in the optimizer. They compute in
float32, read the same batches and start from the same parameters, rounded to the dtype.
"""

import hashlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import track

from effjax.optimizers import adamw_8bit, in_24_bits, in_float32, stochastic_rounding
from effjax.train.optimizers import make_schedule

from .measure import quartiles
from .results import Bars, Result, Size
from .transformer import TransformerLM

LEARNING_RATE = 3e-3
STEPS_PER_CALL = 100
REFERENCE = "plain float32 Adam"
TEST_BYTES = 2**17  # maximum number of bytes to test on


class Variant(NamedTuple):
    """The dtype of the parameters, and the optimizer for a learning rate."""

    param_dtype: str
    make: Callable[..., Any]


def adamw_8bit_small(learning_rate: Any) -> Any:
    """Make AdamW with 8-bit moments for all matrices, also those below 4,096 values."""
    return adamw_8bit(learning_rate, min_size=1024)


VARIANTS = {
    REFERENCE: Variant("float32", optax.adamw),
    "effjax 8-bit moments": Variant("float32", adamw_8bit_small),
    "plain bfloat16 Adam": Variant("bfloat16", optax.adamw),
    "effjax bfloat16, float32 moments": Variant(
        "bfloat16", lambda rate: in_float32(optax.adamw(rate))
    ),
    "effjax bfloat16, stochastic rounding": Variant(
        "bfloat16",
        lambda rate: optax.chain(in_float32(optax.adamw(rate)), stochastic_rounding(0)),
    ),
    "effjax bfloat16, 8-bit moments, stochastic rounding": Variant(
        "bfloat16", lambda rate: optax.chain(adamw_8bit_small(rate), stochastic_rounding(0))
    ),
    "effjax 24 bits, float32 moments": Variant(
        "bfloat16", lambda rate: in_24_bits(optax.adamw(rate))
    ),
    "effjax 24 bits, 8-bit moments": Variant(
        "bfloat16", lambda rate: in_24_bits(adamw_8bit_small(rate))
    ),
}


class Setting(NamedTuple):
    """A model, its batches and the number of steps."""

    layers: int = 2
    width: int = 32
    heads: int = 2
    context: int = 32
    batch_size: int = 8
    steps: int = 2000
    seeds: int = 3


def read_text() -> bytes:
    """Return Python's language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def train_windows(
    data: np.ndarray, context: int, batch_size: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield batches int32 [batch_size, context + 1] without end.

    In each epoch the text is cut into windows that overlap by one byte, in random order and from a
    random first byte.
    """
    starts = _train_starts(len(data), context, seed)
    while True:
        chosen = np.fromiter(itertools.islice(starts, batch_size), np.int64, batch_size)
        yield _windows(data, chosen, context)


def _train_starts(size: int, context: int, seed: int) -> Iterator[int]:
    count = max((size - 1) // context - 1, 1)  # leaves room for the windows to shift
    room = size - 1 - count * context
    for epoch in itertools.count():
        rng = np.random.default_rng([seed, epoch])
        yield from rng.integers(min(room, context - 1) + 1) + context * rng.permutation(count)


def test_windows(
    data: np.ndarray, context: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the windows of a text in order, with weights [batch_size], 0 for padding."""
    count = max(min(len(data) - 1, TEST_BYTES) // context, 1)
    for first in range(0, count, batch_size):
        numbers = np.arange(first, first + batch_size)
        yield _windows(data, numbers % count * context, context), (numbers < count).astype("f4")


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def train(setting: Setting, variant: Variant, text: bytes) -> list[float]:
    """Train a model with each seed, all at once; return mean test losses in nats per byte."""
    data = np.frombuffer(text, np.uint8)
    train_bytes = len(data) - len(data) // 10  # the last tenth is for testing
    models = [
        TransformerLM(
            vocab_size=256,
            num_layers=setting.layers,
            width=setting.width,
            num_heads=setting.heads,
            dtype=jnp.float32,
            rngs=nnx.Rngs(seed),
        )
        for seed in range(setting.seeds)
    ]
    graphdef = nnx.graphdef(models[0])
    wide = [nnx.state(model, nnx.Param) for model in models]
    params = jax.tree.map(lambda *a: jnp.stack(a).astype(variant.param_dtype), *wide)
    tx = variant.make(make_schedule("cosine", LEARNING_RATE, setting.steps, warmup=0.1))

    def losses(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda a: a.astype(jnp.float32), params)
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    def step(state: tuple, tokens: jax.Array) -> tuple[tuple, None]:
        params, opt_state = state
        grads = jax.grad(lambda params: jnp.mean(losses(params, tokens)))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    scan = jax.vmap(lambda state, tokens: jax.lax.scan(step, state, tokens)[0])
    run = jax.jit(scan, donate_argnums=0)
    batches = [
        train_windows(data[:train_bytes], setting.context, setting.batch_size, seed)
        for seed in range(setting.seeds)
    ]
    state = params, jax.vmap(tx.init)(params)
    for first in range(0, setting.steps, STEPS_PER_CALL):
        count = min(STEPS_PER_CALL, setting.steps - first)
        state = run(state, np.stack([[next(of_seed) for _ in range(count)] for of_seed in batches]))
    test = list(test_windows(data[train_bytes:], setting.context, 64))
    test_losses = jax.jit(jax.vmap(losses, (0, None)))
    sums = [test_losses(state[0], tokens).mean(2) @ w for tokens, w in test]
    total = np.sum(np.stack(sums), 0) / sum(w.sum() for _, w in test)
    return [float(loss) for loss in total]


MASTER_COPIES = (
    REFERENCE, "effjax 24 bits, float32 moments", "effjax 8-bit moments",
    "effjax 24 bits, 8-bit moments",
)  # fmt: skip


def compare_losses(
    setting: Setting, names: Sequence[str] = tuple(VARIANTS), result: str = "optimizers"
) -> Result:
    """Train some variants with all seeds."""
    text = read_text()
    digest = hashlib.sha256(text).hexdigest()
    rows = []
    for name in track(names, "training", transient=True):
        values = train(setting, VARIANTS[name], text)
        rows.append(
            {
                "name": name,
                "loss": round(statistics.median(values), 4),
                "loss_quartiles": quartiles(values, 4),
                "losses": [round(value, 4) for value in values],
            }
        )
    return Result(
        result,
        f"test loss of a model of bytes after {setting.steps} steps",
        setting._asdict() | dict(learning_rate=LEARNING_RATE, text="pydoc", text_sha256=digest),
        rows,
        Bars("loss", "test loss [nats per byte] (lines: quartiles of the seeds)"),
        [f"Median over {setting.seeds} seeds, for the parameters and the order of the text."],
    )


def run(size: Size) -> Iterator[Result]:
    published = size == "published"
    yield compare_losses(
        Setting(steps=1000) if published else Setting(steps=100, seeds=1),
        MASTER_COPIES,
        "optimizers_24_bits",
    )
    yield compare_losses(Setting() if published else Setting(steps=300, seeds=1))
