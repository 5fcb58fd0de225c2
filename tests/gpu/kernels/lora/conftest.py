"""Makes the case builder of the CPU tests importable."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "cpu" / "kernels" / "lora"))
