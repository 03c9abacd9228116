"""Training a language model on text, in device memory or with its layers on the host."""
