"""Training on real images.

- `steps`: a data-parallel training step by jit, shard_map and pmap, with sync batch norm
- `data`, `cifar`, `folder`, `augment`: data sets in memory
- `config`, `recipe`, `job`, `loop`, `run_directory`, `checkpoint`, `report`: the run

Imports nothing by itself, so that a command's help does not wait for JAX.
"""
