"""bitsandbytes' NF4: two codes a byte, the higher half first, over the matrix as one row; scales perhaps in 8 bits.

Layout: `QuantState.as_dict(packed=True)` of bitsandbytes/functional.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from quire.compute.schemes.coded import Coded
from quire.compute.weights.codings.layout import Kinds, Reader
from quire.compute.weights.header import Entry
from quire.config.codings import Coding
from quire.config.fields import is_integer

WEIGHT, SCALES, TABLE, STATE = "weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"
NESTED_SCALES, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
MAX_BLOCK: Final = 4096
MAX_STATE_BYTES: Final = 4096


def _allowed(coding: Coding, n: int, k: int) -> Kinds:
    half = -(-n * k // 2)
    return {WEIGHT: (((half, 1), (half,), (1, half)), ("U8",)), TABLE: (((16,),), ("F32",))}


def _more(coding: Coding, entries: Mapping[str, Entry], n: int, k: int) -> str:
    if entries[SCALES].dtype == "U8" and not {NESTED_SCALES, NESTED_TABLE} <= set(entries):
        return f"its {SCALES} is in 8 bits, but {NESTED_SCALES} and {NESTED_TABLE} are not both there"
    if entries[SCALES].dtype not in ("U8", "F32") or entries[STATE].n_bytes > MAX_STATE_BYTES:
        return f"{SCALES} must be of U8 or F32, and {STATE} of at most {MAX_STATE_BYTES} bytes"
    return ""


def _read(coding: Coding, tensors: Mapping[str, torch.Tensor], n: int, k: int) -> Coded:
    state = _state(tensors[STATE], n, k)
    octets = tensors[WEIGHT].flatten()
    codes = torch.stack((octets >> 4, octets & 15), dim=1).flatten()[: n * k].view(n, k)
    scales, block = tensors[SCALES].flatten(), state["blocksize"]
    if scales.dtype is torch.uint8:
        of_scales = tensors[NESTED_SCALES].float().repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = tensors[NESTED_TABLE].float()[scales.int()] * of_scales + state["nested_offset"]
    if len(scales) != -(-n * k // block):
        raise ValueError(f"{SCALES} has {len(scales):,} scales, not one for each {block} weights")
    group = math.gcd(k, block)
    scales = scales.repeat_interleave(block // group)[: n * k // group].view(n, k // group)
    return Coded(codes, scales, group, table=tuple(tensors[TABLE].tolist()))


def _state(stored: torch.Tensor, n: int, k: int) -> dict[str, Any]:
    """What says how scales are stored. Raises ValueError."""
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        raise ValueError(f"{STATE} is not valid JSON") from None
    sizes = ("blocksize", *(("nested_blocksize",) if isinstance(state, dict) and "nested_blocksize" in state else ()))
    if not isinstance(state, dict) or state.get("shape") != [n, k] or state.get("quant_type") != "nf4":
        raise ValueError(f"{STATE} must be of an NF4 matrix {[n, k]}, not {str(state)[:100]}")
    if not all(is_integer(state.get(name)) and 1 <= state[name] <= MAX_BLOCK for name in sizes):
        raise ValueError(f"{STATE}: {' and '.join(sizes)} must be from 1 to {MAX_BLOCK}")
    offset = state.setdefault("nested_offset", 0.0)
    if not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise ValueError(f"{STATE}: nested_offset must be a number")
    state.setdefault("nested_blocksize", MAX_BLOCK)
    return state


NF4 = Reader(
    (STATE, NESTED_SCALES, NESTED_TABLE, SCALES, TABLE, WEIGHT), lambda _: (STATE, SCALES, TABLE, WEIGHT),
    _allowed, _read, _more,
)  # fmt: skip
