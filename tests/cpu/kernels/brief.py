"""Imported before torch by scripts of some seconds, never by tests: nobody looks for garbage there, nor at their end.
That takes a twentieth of their time."""

from __future__ import annotations

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
