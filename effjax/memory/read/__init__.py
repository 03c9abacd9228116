"""Read a compiled program: its instructions, buffers and source lines."""
