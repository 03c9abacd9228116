"""Memory planner: memory use and modelled time of a compiled program, and residuals."""

from .._names import list_public as _list_public
from ..ops.offload.compiled import host_memory_limit as host_memory_limit
from ._hlo import Collective as Collective
from ._hlo import Transfer as Transfer
from ._hlo import collectives as collectives
from ._lower import PlanError as PlanError
from .batch_size import max_batch_size as max_batch_size
from .budget import OptionSearch as OptionSearch
from .budget import Trial as Trial
from .budget import choose_options as choose_options
from .plan import compare as compare
from .plan import plan as plan
from .rates import Rates as Rates
from .rates import find_rates as find_rates
from .residuals import residual_bytes as residual_bytes
from .results import Buffer as Buffer
from .results import Bytes as Bytes
from .results import Comparison as Comparison
from .results import MaxBatch as MaxBatch
from .results import MemoryPlan as MemoryPlan
from .results import ResidualReport as ResidualReport
from .step_time import StepTime as StepTime
from .step_time import step_time as step_time
from .targets import Target as Target
from .targets import list_targets as list_targets


def __dir__() -> list[str]:
    return _list_public(globals())
