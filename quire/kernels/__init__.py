"""How each operation runs on each device. One folder an op: op.py (public), reference.py (oracle), triton.py, cpu.py.

catalog.py lists the implementations of every op, selector.py takes the first that fits.

Owns arithmetic only; owns no policy, no model and no state. Usable alone as a library.
Invariant: every op has a slow reference with the same signature beside it, and a test that compares them.
"""
