"""Memory planner: memory use and modelled time of a compiled program, and residuals."""

from .._names import list_public as _list_public
from .compiler.lower import PlanError as PlanError
from .devices import Rates as Rates
from .devices import Target as Target
from .devices import find_rates as find_rates
from .devices import list_targets as list_targets
from .plan import compare as compare
from .plan import plan as plan
from .read.hlo import collectives as collectives
from .residuals import residual_bytes as residual_bytes
from .results import Comparison as Comparison
from .results import MaxBatch as MaxBatch
from .results import MemoryPlan as MemoryPlan
from .results import OptionSearch as OptionSearch
from .results import ResidualReport as ResidualReport
from .search.batch_size import max_batch_size as max_batch_size
from .search.budget import choose_options as choose_options


def __dir__() -> list[str]:
    return _list_public(globals())
