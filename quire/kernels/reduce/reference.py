"""Sums over ranks in plain torch, of what all ranks have: the oracle. float32, in the order of ranks, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.norm import reference


def total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """terms: what each rank has, alike. Returns what all of them get."""
    wide = torch.promote_types(terms[0].dtype, torch.float32)
    found = terms[0].to(wide)
    for term in terms[1:]:
        found = found + term.to(wide)
    return found.to(terms[0].dtype)


def add(
    terms: Sequence[torch.Tensor], x: torch.Tensor, norm: tuple[torch.Tensor, float] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x + total, rounded again; its RMS norm, where one is given as weight and eps). x is left as it is."""
    stream = x + total(terms)
    return stream, None if norm is None else reference.rms_norm(stream, *norm)
