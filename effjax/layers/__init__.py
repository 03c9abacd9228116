"""What the linen and the nnx modules share: options, shapes, initial values, statistics."""
