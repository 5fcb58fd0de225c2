"""Sums over the ranks of one host, one process a GPU: what the kernel does, and what it must equal."""
