"""The pieces a model is made of: linear, norm, rotary table, and `Context`, by which attention reaches the cache."""
