"""Reads model files: headers to ModelSpec (torch-free), raw weight bytes, tokenizers, chat templates."""
