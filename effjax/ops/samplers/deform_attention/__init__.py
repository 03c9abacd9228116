"""Deformable attention and its special case, the aggregation of DCNv3."""

from .api import ms_deform_attn as ms_deform_attn
from .dcn import dcn_aggregate as dcn_aggregate
