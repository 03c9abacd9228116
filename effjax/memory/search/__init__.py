"""Search the largest batch, or the fastest options, that fit."""
