"""Benchmarks: one file an operator, effjax beside its peers in one run. ``effjax bench --list``, or
``python -m effjax.bench.dense_block --help``.
"""
