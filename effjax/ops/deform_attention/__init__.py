"""Deformable attention, and the aggregation of DCNv3, which is a special case."""

from .api import ms_deform_attn as ms_deform_attn
from .dcn import dcn_aggregate as dcn_aggregate
