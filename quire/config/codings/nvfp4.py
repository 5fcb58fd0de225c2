"""NVFP4: numbers of 4 bits (e2m1) with an e4m3 scale for each 16 inputs, and a scale of the tensor."""

from __future__ import annotations

from typing import Final

from quire.config.codings.coding import Coding, Layout

GROUP: Final = 16
CODING: Final = Coding(layout=Layout.NVFP4, bits=4, group=GROUP, is_float=True)
"""What is multiplied by it stays as it is, also where the writer meant it to be rounded to 4 bits too."""
