"""Framework-independent layer code shared by the linen and nnx modules."""
