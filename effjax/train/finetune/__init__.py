"""Fine-tuning of language models from checkpoints in Hugging Face's layout."""
