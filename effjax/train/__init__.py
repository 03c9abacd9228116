"""Training on images and on text: one loop, and what it trains.

- `loop`: trains a task, tests it, and goes on after an interruption with the same bits
- `run_directory`, `checkpoint`, `report`, `mesh`, `errors`: what the loop and the tasks share
- `data`: images and text, in memory
- `images`, `lm`: a task each

Imports nothing by itself, so that a command's help does not wait for JAX.
"""
