"""Options chosen to fit in several budgets of memory, against one setting for all of them.

A decoder, a DenseNet and a ResNet are planned by `effjax.memory.choose_options` with the same
options as ``effjax train --fit``. The setting for all budgets is the fastest one that fits in the
smallest budget.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from effjax.memory import choose_options
from effjax.train import decoder_forms
from effjax.train.images import forms as images
from effjax.train.images.config import DenseNetConfig, ImageConfig, ResNetConfig
from effjax.train.lm import model as lm
from effjax.train.lm.config import LMConfig

from .measure import TARGET, need_compiler
from .results import Bars, Result, Size


class Model(NamedTuple):
    """A model, what to choose for it, and the budgets in GB."""

    name: str
    title: str
    options: Mapping[str, Sequence[Any]]
    not_by_time: Sequence[str]
    make_step: Callable[..., tuple[Any, ...] | None]
    budgets: Sequence[float]
    min_bytes: Callable[..., tuple[int, int]] | None = None


def decoder(budgets: Sequence[float], **options: Any) -> Model:
    config = LMConfig(**options)

    def make_step(**choice: Any) -> tuple[Any, ...] | None:
        chosen = decoder_forms.with_memory_options(config, **choice)
        return None if chosen is None else lm.lm_training_step(chosen)

    title = (
        f"decoder of {config.layers} layers, width {config.width}, context {config.context}, "
        f"batch {config.batch_size}, {config.dtype}"
    )
    name = f"decoder_{config.layers}x{config.width}"
    shape = config.batch_size, config.context
    min_bytes = functools.partial(
        decoder_forms.min_bytes, lm.make_model(config), shape, config.dtype
    )
    return Model(
        name, title, decoder_forms.MEMORY_OPTIONS, decoder_forms.NOT_BY_TIME, make_step, budgets,
        min_bytes,
    )  # fmt: skip


def image_network(config: ImageConfig, side: int, classes: int, budgets: Sequence[float]) -> Model:
    def make_step(**choice: Any) -> tuple[Any, ...] | None:
        chosen = images.with_memory_options(config, **choice)
        if chosen is None:
            return None
        return images.image_training_step(chosen, (side, side, 3), classes)

    title = f"{config.network}, batch {config.batch_size} of {side}x{side}, {config.dtype}"
    options = images.IMAGE_MEMORY_OPTIONS
    return Model(config.network, title, options, tuple(options), make_step, budgets)


MODELS: dict[Size, list[Model]] = {
    "small": [
        decoder((0.02, 0.05), layers=4, width=64, heads=4, context=64, batch_size=16),
        image_network(ResNetConfig(depth=8, batch_size=64), 32, 10, (0.1, 1)),
    ],
    "published": [
        decoder((5, 10, 20, 40), layers=24, width=1024, heads=16, context=512, batch_size=32),
        image_network(
            ResNetConfig(depth=50, batch_size=256, dtype="bfloat16"), 224, 1000, (4, 8, 16)
        ),
        image_network(
            DenseNetConfig(model="densenet121", batch_size=256, dtype="bfloat16"), 224, 1000,
            (4, 8, 16),
        ),
    ],
}  # fmt: skip


def fit_budgets(model: Model, target: str = TARGET) -> Result:
    """Choose options for each budget; "ratio" is relative to the setting for all budgets."""
    found = {
        budget: choose_options(
            model.make_step, model.options, not_by_time=model.not_by_time,
            min_bytes=model.min_bytes,
            target=target, budget=round(budget * 1e9), progress=True,
        )
        for budget in sorted(model.budgets)
    }  # fmt: skip
    single = found[min(found)]
    if single.plan is None:
        raise ValueError(f"{model.name}: {single}")
    rows = []
    for budget, search in found.items():
        assert search.options is not None and search.plan is not None  # those of `single` fit
        rows.append(
            {
                "name": f"{budget:g} GB",
                "options": search.options,
                "planned_device_bytes": search.plan.peak_device_bytes,
                "planned_host_bytes": search.plan.peak_host_bytes,
                "step_seconds": search.plan.step_seconds,
                "ratio": round(search.plan.step_seconds / single.plan.step_seconds, 4),
                "compiled": search.num_compiled,
                "combinations": len(search.trials),
                "is_complete": search.is_complete,
            }
        )
    mean = statistics.mean(row["ratio"] for row in rows)
    return Result(
        f"fit_{model.name}_{target}",
        f"{model.title}: options that fit, planned for {target}",
        {
            "target": target,
            "options": {name: list(values) for name, values in model.options.items()},
            "setting_for_all_budgets": single.options,
            "mean_ratio": round(mean, 4),
        },
        rows,
        Bars("ratio", "modelled time relative to one setting for all budgets"),
        ["Times are modelled from published peak rates, not measured."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler()
    for model in MODELS[size]:
        yield fit_budgets(model)
