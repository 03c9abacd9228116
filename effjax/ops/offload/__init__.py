"""Offload: models that live in host memory and stream through the device."""

from .compiled import offload_jit as offload_jit
from .host_init import host_init as host_init
from .placement import to_device as to_device
from .placement import to_host as to_host
from .sequential import offload_sequential as offload_sequential
from .stack import offload_scan as offload_scan
from .train_state import OffloadState as OffloadState
from .train_step import offload_train_step as offload_train_step
from .update import stream_update as stream_update
