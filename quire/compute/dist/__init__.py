"""Several ranks of one model: what they say to one another. The only place that knows `torch.distributed`."""
