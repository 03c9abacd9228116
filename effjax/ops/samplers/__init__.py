"""Operators that read images at computed positions, by custom calls or by XLA."""

from .deform_attention import dcn_aggregate as dcn_aggregate
from .deform_attention import ms_deform_attn as ms_deform_attn
from .deform_conv import deform_conv2d as deform_conv2d
from .roi import deform_psroi_pool as deform_psroi_pool
from .roi import deform_roi_pool as deform_roi_pool
from .roi import multiscale_roi_align as multiscale_roi_align
from .roi import roi_align as roi_align
