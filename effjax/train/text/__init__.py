"""Fine-tuning of language models on rows of JSON, and generation with them."""
