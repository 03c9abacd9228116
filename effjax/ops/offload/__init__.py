"""Offload: models in host memory whose layers stream through the device.

- `train_step`: a whole training step, with its state in `train_state`, and the functions before and
  after the layers in `embed_head`.
- `layers`: the two forms of layers, a stack and a list, with the same methods: forward and backward
  pass, and updates of one layer at a time, also as `stream_update`.
- `stack`, `sequential`: the operators of stacks of identical layers and of different layers.
- `slices`: options of the operators; forward and backward pass of one slice.
- `optimizer`: an optimizer on the device, with clipping and loss scales.
- `row_update`: updates of large parameters in host memory, whole or in chunks of rows.
- `mixing`: the check that an optimizer treats parameters and layers separately.
- `host_init`: initialization in host memory; the place of each array of an optimizer's state.
- `compiled`: `offload_jit`.
- `backends`: what XLA needs on each platform: options, the order of slices, loops over them.
- `placement`: moves between memories.
- `trees`: pytrees of parameters, layers and microbatches.
"""

from .compiled import offload_jit as offload_jit
from .host_init import host_init as host_init
from .layers import stream_update as stream_update
from .optimizer import OffloadParams as OffloadParams
from .placement import to_device as to_device
from .placement import to_host as to_host
from .sequential import offload_sequential as offload_sequential
from .stack import offload_scan as offload_scan
from .train_state import OffloadState as OffloadState
from .train_step import offload_train_step as offload_train_step
