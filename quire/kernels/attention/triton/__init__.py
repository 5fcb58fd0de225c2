"""Attention in Triton for any CUDA device: kernels, hooks in generated modules, the launch."""
