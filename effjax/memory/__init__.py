"""What a computation costs in memory: on a GPU that need not be there, and between the passes."""

from ..ops.offload.host_pool import HOST_MEMORY_VARIABLE as HOST_MEMORY_VARIABLE
from ..ops.offload.host_pool import host_memory_limit as host_memory_limit
from ._compile import PlanError as PlanError
from ._compile import check_compiler as check_compiler
from ._compile import mesh_to_plan_for as mesh_to_plan_for
from ._hlo import Collective as Collective
from ._hlo import Transfer as Transfer
from ._hlo import collectives as collectives
from .batch_size import MaxBatch as MaxBatch
from .batch_size import max_batch_size as max_batch_size
from .compare import Comparison as Comparison
from .compare import compare as compare
from .compare import plan_all as plan_all
from .data_parallel import data_parallel as data_parallel
from .plan import Buffer as Buffer
from .plan import Bytes as Bytes
from .plan import MemoryPlan as MemoryPlan
from .plan import plan as plan
from .residuals import ResidualReport as ResidualReport
from .residuals import residual_bytes as residual_bytes
from .targets import Target as Target
from .targets import list_targets as list_targets
