"""Features of boxes: averages of samples, from a custom call or XLA."""

from .api import deform_psroi_pool as deform_psroi_pool
from .api import deform_roi_pool as deform_roi_pool
from .api import multiscale_roi_align as multiscale_roi_align
from .api import roi_align as roi_align
