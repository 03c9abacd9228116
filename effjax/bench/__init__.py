"""Benchmarks: one file an operator, effjax beside its peers in one run. ``python -m
effjax.bench.dense_block --help``.
"""
