"""Executors: this process alone, this process and ranks beside it, the null device."""
