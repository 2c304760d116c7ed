"""Reads model files: headers to ModelSpec (torch-free), raw weight bytes, tokenizers, chat templates."""

from pshard.models.model_file import ModelFile, open_model

__all__ = ["ModelFile", "open_model"]
