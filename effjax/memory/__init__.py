"""What a computation costs in memory."""

from .residuals import ResidualReport as ResidualReport
from .residuals import residual_bytes as residual_bytes
