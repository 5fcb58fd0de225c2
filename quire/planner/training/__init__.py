"""What training a model takes: memory, FLOPs, days, traffic between devices. Never imports torch."""
