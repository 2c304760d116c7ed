"""Executes plans: arena, weights, streaming, blocks, kernels, KV cache, tensor parallel, sampling, engine."""
