"""Training on images and on text: one loop, and the tasks that it trains.

- `loop`: trains, validates and tests a task, and resumes an interrupted run exactly.
- `run_directory`, `checkpoint`, `report`, `mesh`, `processes`, `errors`: shared by the loop and the
  tasks.
- `data`: images, text and rows of JSON.
- `images`, `lm`, `finetune`: the tasks.

This module imports nothing, so that the help of a command does not wait for JAX.
"""
