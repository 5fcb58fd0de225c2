"""The values that attention takes: a variant (what is computed) and a plan (for which tokens). Owns no arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """softmax(cap(scale * q k)) v, causal."""

    scale: float
    """Factor on q·k, usually head_dim ** -0.5."""
    window: int = 0
    """w > 0: the token at position i sees positions i-w+1 .. i; 0: all of 0 .. i."""
    softcap: float = 0.0
    """c > 0: scores become c * tanh(score / c) after scaling (Gemma 2, section 2); 0: unchanged."""


class PlanBuffers(Protocol):
    """Device memory with fixed addresses that holds one step's work list after another (for CUDA graphs)."""

    def fill(self, plan: AttnPlan) -> Any:
        """Overwrite with this plan's work, in stream order; raises ValueError when it does not fit."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttnPlan:
    """One step's spans, and what a device derived from them. Valid for every layer of the step."""

    q_indptr: np.ndarray
    """int32 [n_spans + 1]: rows of q of span s are q_indptr[s] .. q_indptr[s + 1] - 1."""
    kv_lens: np.ndarray
    """int32 [n_spans]: tokens of the sequence after this step; the span's rows are the last of them."""
    slots: np.ndarray
    """int32 [n_spans]: row of the page table of each span."""
    page_table: torch.Tensor
    """int32 [n_slots, max_pages], on the device; read when `run` executes."""
    page_size: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    tiles: Any = None
    """The device's own work list (see cpu.py and tiles.py)."""
