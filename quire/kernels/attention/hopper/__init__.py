"""Attention in CUDA C++ for Hopper: hooks in a generated header, the builds and their launch."""
