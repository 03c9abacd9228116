"""Benchmarks of effjax and other libraries: `python -m benchmarks --list`."""
