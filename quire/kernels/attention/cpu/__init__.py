"""Attention in the native library of the CPU: its work, the compilation of hooks, the call."""
