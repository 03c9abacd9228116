"""Options chosen to fit in several budgets of memory, against one setting for all of them.

A DenseNet and a ResNet are planned by `effjax.memory.choose_options` with the same options as
``effjax train --fit``. The setting for all budgets is the fastest one that fits in the
smallest budget.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from effjax.memory import choose_options
from effjax.train.images.config import DenseNetRunConfig, ImageConfig, ResNetRunConfig
from effjax.train.images.plans import memory_choices

from .measure import TARGET, need_compiler
from .results import Bars, Result, Size


class Model(NamedTuple):
    """A model, what to choose for it, and the budgets in GB."""

    name: str
    title: str
    options: Mapping[str, Sequence[Any]]
    make_step: Callable[..., tuple[Any, ...] | None]
    budgets: Sequence[float]


def image_network(config: ImageConfig, side: int, classes: int, budgets: Sequence[float]) -> Model:
    choices = memory_choices(config, image_shape=(side, side, 3), num_classes=classes)

    def make_step(**choice: Any) -> tuple[Any, ...] | None:
        chosen = choices.change(**choice)
        return None if chosen is None else choices.training_step(chosen)

    title = f"{config.network}, batch {config.batch_size} of {side}x{side}, {config.dtype}"
    return Model(config.network, title, choices.options, make_step, budgets)


MODELS: dict[Size, list[Model]] = {
    "small": [
        image_network(ResNetRunConfig(depth=8, batch_size=64), 32, 10, (0.1, 1)),
    ],
    "published": [
        image_network(
            ResNetRunConfig(depth=50, batch_size=256, dtype="bfloat16"), 224, 1000, (4, 8, 16)
        ),
        image_network(
            DenseNetRunConfig(model="densenet121", batch_size=256, dtype="bfloat16"), 224, 1000,
            (4, 8, 16),
        ),
    ],
}  # fmt: skip


def fit_budgets(model: Model, target: str = TARGET, cache: Path | None = None) -> Result:
    """Choose options for each budget; "ratio" is relative to the setting for all budgets."""
    found = {
        budget: choose_options(
            model.make_step, model.options, not_by_time=tuple(model.options),
            target=target, budget=round(budget * 1e9), progress=True, cache=cache,
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
