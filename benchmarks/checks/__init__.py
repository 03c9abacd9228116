"""Checks of long runs, killed runs and CUDA machine code: `python -m benchmarks.checks.NAME`."""
