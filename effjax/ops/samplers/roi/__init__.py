"""RoI pooling: averages of bilinear samples in boxes, computed by a custom call or by XLA."""

from .api import deform_psroi_pool as deform_psroi_pool
from .api import deform_roi_pool as deform_roi_pool
from .api import multiscale_roi_align as multiscale_roi_align
from .api import roi_align as roi_align
