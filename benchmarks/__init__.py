"""Benchmarks of effjax and its peers: `python -m benchmarks --list`."""
