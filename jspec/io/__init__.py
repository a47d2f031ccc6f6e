"""Reading foreign files: Hugging Face folders, GGUF, tokenizers, drafter heads."""
