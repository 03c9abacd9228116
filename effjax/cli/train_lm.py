"""`effjax train lm`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..train.lm.config import LMConfig
from .training import follow, train_command

if TYPE_CHECKING:
    from ..memory import MemoryPlan


def train_text(
    config: LMConfig,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
) -> None:
    """Trains a language model in `out`: checks everything, then writes."""
    from ..train.lm import report
    from ..train.lm.task import prepare

    task, console = prepare(config), Console()
    run, result = follow("lm", console, task, report, out, overwrite, resume)
    report.show_result(console, run, result, _planned(config))


@train_command("lm", LMConfig, train_text, saver="--remat, or --offload all")
def train_lm(out: Path, overwrite: bool, **options: Any) -> None:
    """Train a transformer on the bytes of a text, and test it on the text's last tenth."""
    train_text(LMConfig(**options), out, overwrite)


def _planned(config: LMConfig) -> "MemoryPlan | None":
    """What a step needs on an H200; None where the planner's compiler is not installed."""
    from ..memory import PlanError, plan
    from ..train.lm.forms import lm_training_step

    try:
        return plan(*lm_training_step(config))
    except PlanError:
        return None
