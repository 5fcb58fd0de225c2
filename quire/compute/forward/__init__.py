"""Forward strategies: ways to compute the states of a step. Each has the values of `eager.py`, as its tests show."""
