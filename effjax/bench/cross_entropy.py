"""Device memory of the gradients of a large vocabulary on a GPU that need not be there.

Of a language model's head alone, and of the whole model, whose layers are recomputed: with
`effjax.linear_cross_entropy`, with whole logits, with those computed again in the backward pass,
and with slices of the time axis in a checkpointed scan, the strongest of its peers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx

from ..memory.compare import plan_all
from ..models import TransformerLM, scan_layers
from ._result import Bars, Result, Size, need_compiler, publish

SLICES = 16  # of the time axis


def plain(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """The losses of tokens by what the last layer returns."""
    return optax.softmax_cross_entropy_with_integer_labels(model(params).logits(x), labels)


def scan_time(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    """`plain`, checkpointed, of one slice of the time axis after the other."""
    one = jax.checkpoint(functools.partial(plain, model, params), prevent_cse=False)

    def split(a):
        return jnp.moveaxis(a.reshape(len(a), SLICES, -1, *a.shape[2:]), 1, 0)

    return jax.lax.scan(lambda _, at: (None, one(*at)), None, (split(x), split(labels)))[1]


def ours(model: Callable, params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return model(params).losses(x, labels)


LOSSES: dict[str, Callable] = {
    "plain": plain,
    "jax.checkpoint": jax.checkpoint(plain, static_argnums=0),
    "jax.checkpoint in a scan over time": scan_time,
    "effjax": ours,
}


def steps_of(model: TransformerLM, losses: Callable, batch_size: int, context: int) -> dict:
    """`(fn, *args)` of the gradients, from shapes: of the head, and of the whole model."""
    graphdef, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    merged = lambda some: nnx.merge(graphdef, params | some)  # noqa: E731
    tokens = jax.ShapeDtypeStruct((batch_size, context + 1), jnp.int32)
    labels = jax.ShapeDtypeStruct((batch_size, context), jnp.int32)
    head = {name: params[name] for name in ("norm", "head")}
    x = jax.eval_shape(lambda p, y: merged(p).features(y), params, labels)

    def of_head(params, x, labels):
        return jnp.mean(losses(merged, params, x, labels))

    def of_model(params, tokens):
        layers = functools.partial(scan_layers, remat=True)
        x = merged(params).features(tokens[:, :-1], apply_layers=layers)
        return of_head(params, x, tokens[:, 1:])

    return {
        "head": (jax.grad(of_head, (0, 1)), head, x, labels),
        "model": (jax.grad(of_model), params, tokens),
    }


def bench(config: dict[str, Any], context: int, batch_sizes: Sequence[int], target: str) -> Result:
    """Plans the gradients of a transformer, of these options, with every loss."""
    model = nnx.eval_shape(lambda: TransformerLM(**config, rngs=nnx.Rngs(0)))
    rows = []
    for size in batch_sizes:
        steps = {name: steps_of(model, losses, size, context) for name, losses in LOSSES.items()}
        for part in ("head", "model"):
            these = {name: step[part] for name, step in steps.items()}
            plans = plan_all(these, target=target, progress=True)
            rows += [
                {"name": name, "of": part, "batch_size": size, "peak_bytes": p.peak_device_bytes}
                | {"temp_bytes": p.device.temporaries}
                for name, p in plans.items()
            ]
    vocabulary = config["vocab_size"]
    return Result(
        f"cross_entropy_{vocabulary}_{target}",
        f"gradients of a language model of {vocabulary} tokens, planned for {target}",
        config | dict(context=context, target=target),
        rows,
        Bars("peak_bytes", "peak of the gradients [bytes]", groups=("of", "batch_size"), log=True),
        [f"Sequences of {context} tokens, {config['dtype']}; batch: how many of them."],
    )


def results(size: Size) -> Iterator[Result]:
    need_compiler()
    if size == "published":
        config = dict(num_layers=4, width=512, num_heads=8, vocab_size=32768, dtype="bfloat16")
        yield bench(config, 1024, [16, 64], "h200")
    else:
        config = dict(num_layers=2, width=128, num_heads=4, vocab_size=32768, dtype="bfloat16")
        yield bench(config, 256, [16], "h200")


def main(
    layers: int = 4,
    width: int = 512,
    heads: int = 8,
    vocab_size: int = 32768,
    context: int = 1024,
    batch_size: Annotated[list[int], typer.Option(help="Each is planned.")] = [16, 64],  # noqa: B006
    dtype: Annotated[str, typer.Option(help="Of the computation; parameters are float32.")] = (
        "bfloat16"
    ),
    target: str = "h200",
    json: Annotated[Path | None, typer.Option(help="Folder for the JSON file.")] = None,
) -> None:
    """Plans the gradients of a transformer with every loss."""
    config: dict[str, Any] = dict(num_layers=layers, width=width, num_heads=heads)
    config |= dict(vocab_size=vocab_size, dtype=dtype)
    publish(bench(config, context, batch_size, target), json)


if __name__ == "__main__":
    typer.run(main)
