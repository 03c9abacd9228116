"""Attention at few points of feature maps, and DCNv3's aggregation, which is the same."""

from .api import ms_deform_attn as ms_deform_attn
from .dcn import dcn_aggregate as dcn_aggregate
