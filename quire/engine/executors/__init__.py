"""Executors: the in-process device, the null device, and later worker processes."""
