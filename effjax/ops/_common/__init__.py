"""Argument validation, dispatch and sharding shared by the operators."""
