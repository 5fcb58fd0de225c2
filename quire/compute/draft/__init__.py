"""Drafters: what guesses the next tokens of a sequence, for one step to verify."""
