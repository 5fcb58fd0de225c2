"""Ranks beside the engine's own: their processes, what they are told and how they are watched."""
