"""Quantised folders of safetensors: what each of their formats means, as types that the runtime has."""
