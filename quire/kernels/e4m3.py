"""e4m3: numbers of 8 bits with 3 of fraction, without infinity (Micikevicius et al. 2022, arXiv 2209.05433)."""

from __future__ import annotations

from typing import Final

import torch

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = torch.finfo(E4M3).max
"""Its largest number, 448; what is larger is cut off there. In C++: csrc/cuda/rows.cu."""
