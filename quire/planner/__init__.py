"""The analytic model: memory, bytes, FLOPs and time of a step, from shapes alone. Never imports torch."""
