"""How the tensors of a checkpoint are coded matrices, a file for each layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quire.compute.weights.codings.awq import AWQ
from quire.compute.weights.codings.gptq import GPTQ
from quire.compute.weights.codings.layout import Reader
from quire.compute.weights.codings.mxfp4 import MXFP4
from quire.compute.weights.codings.nf4 import NF4
from quire.compute.weights.codings.nvfp4 import NVFP4
from quire.compute.weights.codings.packed import PACKED
from quire.compute.weights.codings.scaled import SCALED
from quire.config.codings import Layout

READERS: Final[Mapping[Layout, Reader]] = {
    Layout.PACKED: PACKED,
    Layout.GPTQ: GPTQ,
    Layout.AWQ: AWQ,
    Layout.SCALED: SCALED,
    Layout.MXFP4: MXFP4,
    Layout.NVFP4: NVFP4,
    Layout.NF4: NF4,
}

__all__ = ["READERS", "Reader"]
