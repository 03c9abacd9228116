"""Offload: models that live in host memory and stream through the device.

What reads what, from above:

    train_step          a whole step: train_state (what it carries), ends (before and after the
                        layers), scaling (of losses and gradients)
    update              optimizers alone: update_stack, update_list, optimizer (one layer of both),
                        per_leaf (which optimizers can be taken), dependencies (read from programs)
    stack, sequential   like and unlike layers
    slices, residuals   a slice: forward, backward, and what is kept between them
    host_init           parameters made on the host
    compiled            offload_jit, and what XLA must be told; host_pool (how much it may hold)
    options, checks, trainable, trees, loops, placement
"""

from .compiled import offload_jit as offload_jit
from .host_init import host_init as host_init
from .placement import to_device as to_device
from .placement import to_host as to_host
from .sequential import offload_sequential as offload_sequential
from .stack import offload_scan as offload_scan
from .train_state import OffloadState as OffloadState
from .train_step import offload_train_step as offload_train_step
from .update import stream_update as stream_update
