"""Operators: pure functions of arrays. They import only jax and hold no state."""
