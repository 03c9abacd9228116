"""Training a language model on text: the run of `effjax train lm`.

- `steps`: the loss, and a training step around it
- `config`, `job`, `loop`, `report`: the run

Imports nothing by itself, as `effjax.train`.
"""
