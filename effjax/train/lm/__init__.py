"""Training of a language model, with its layers in device or host memory."""
