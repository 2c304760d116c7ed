"""Kernels on packed weights: host (C++), CUDA (Triton) and plain torch twins."""
