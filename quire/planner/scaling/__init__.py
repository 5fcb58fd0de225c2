"""Scaling laws: the loss of a model from its parameters and tokens, the best of both for a budget, and fits to runs."""
