"""Training on images and on text: one loop, and the tasks that it trains.

- `loop`: trains, validates and tests a task, and resumes an interrupted run exactly.
- `config`: the options of a run, each one field of a dataclass.
- `run_directory`, `checkpoint`, `report`, `optimizers`, `mesh`, `processes`, `errors`: shared by
  the loop and the tasks.
- `images`, `text`: the tasks, with their configurations, data, models and planned steps.

This module imports nothing, so that the help of a command does not wait for JAX.
"""
