"""Training of language models on bytes of a text, or from a checkpoint on rows of JSON."""
