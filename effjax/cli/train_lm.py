"""`effjax train lm`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from ..train.lm.config import LMConfig
from .options import option
from .training import follow, make_console, train_command

if TYPE_CHECKING:
    from ..memory import MemoryPlan


def train_text(
    config: LMConfig,
    out: Path,
    overwrite: bool = False,
    resume: bool = False,
    fall_back: bool = False,
    plan: bool = False,
) -> None:
    """Trains a language model in `out`: checks everything, then writes."""
    from ..train.lm import report
    from ..train.lm.task import prepare

    task, console = prepare(config, resume=resume), make_console()
    if task.base is not None:
        task.base.check_apart(out)
    run, result = follow("lm", console, task, report, out, overwrite, resume, fall_back)
    planned = _planned(config, task.mesh.size, console) if plan and run.writes else None
    report.show_result(console, run, result, planned)


@train_command(
    "lm", LMConfig, train_text, saver="--remat, or --offload all", with_resume=("steps", "plan")
)
def train_lm(
    out: Path,
    overwrite: bool,
    *,
    plan: Annotated[
        bool, option("Plan the step's memory on an H200 at the end.", name="--plan")
    ] = False,
    **options: Any,
) -> None:
    """Train a transformer on the bytes of a text, and test it on the text's last tenth."""
    train_text(LMConfig(**options), out, overwrite, plan=plan)


def _planned(config: LMConfig, num_devices: int, console: Console) -> "MemoryPlan | None":
    """What a step needs on an H200; None where it cannot be planned, which is said."""
    from ..memory import PlanError, plan
    from ..train.lm.forms import lm_training_step
    from ..train.report import line

    line(console, "planning a step for an H200")
    try:
        return plan(*lm_training_step(config, num_devices if config.mesh else 1))
    except (PlanError, OSError) as error:  # the latter of a full temporary folder
        return line(console, f"not planned: {error}")
