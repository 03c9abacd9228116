"""Training on images and on text: one loop, and the tasks that it trains.

- `loop`: trains, validates and tests a task, and resumes an interrupted run exactly.
- `config`: the options of a run, each one field of a dataclass.
- `run_directory`, `checkpoint`, `report`, `optimizers`, `mesh`, `processes`, `errors`: shared by
  the loop and the tasks.
- `images`, `text`: the tasks, with their configurations, data, models and planned steps.

Names are imported at first use, so that the help of a command does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .._names import missing_name as _missing_name

_NAMES = {
    "FinetuneConfig": "text.config",
    "FinetunedModel": "text.finetune",
    "PreemptionError": "errors",
    "TextResult": "text.task",
    "TrainError": "errors",
    "finetune": "text.finetune",
    "make_handler_registry": "array_handler",
}

if TYPE_CHECKING:
    from .array_handler import make_handler_registry as make_handler_registry
    from .errors import PreemptionError as PreemptionError
    from .errors import TrainError as TrainError
    from .text.config import FinetuneConfig as FinetuneConfig
    from .text.finetune import FinetunedModel as FinetunedModel
    from .text.finetune import finetune as finetune
    from .text.task import TextResult as TextResult
else:

    def __getattr__(name: str) -> Any:
        if name not in _NAMES:
            raise _missing_name(__name__, name)
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted(_NAMES)
