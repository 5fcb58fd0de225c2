"""Who computes what: the plan of a step, its cutting into lines of work, and their place on a device.

Owns no arithmetic: nothing here knows a hook of a variant, nor `cpu`, `hopper` or `triton`.
"""
