"""Random traffic over a whole engine with an independent judge of every token; see `soak.py`. Shared by tests/cpu,
tests/gpu and benchmarks/soak.py."""
