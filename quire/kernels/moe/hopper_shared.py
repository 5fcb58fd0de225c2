"""Experts and what every token goes through beside them, for few tokens, in one call of the kernel for few rows.

Owns when that is possible. Does not own the kernel nor its launch (hopper.py). Of the shared matrices n parts of the
inner vector, each as wide as an expert's, are n more experts, which all tokens have with weight 1.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

from quire.config.experts import Gating
from quire.kernels.catalog import Slower
from quire.kernels.invariance import are_rows_alone
from quire.kernels.moe import hopper
from quire.kernels.moe.plan import FEW_TOKENS, MAX_CHOSEN, FewPlan

SWIGLU: Final = Gating()
MAX_ROWS: Final = FEW_TOKENS[0]
"""All tokens are one tile of an expert: in more tiles its weights would be read as many times."""


@dataclasses.dataclass(frozen=True, slots=True)
class SharedLaunch:
    """`experts_with_shared` for the arguments that it was prepared for."""

    launch: hopper.Launch

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
        shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        return self.launch(x, expert_ids, weights, up, down, SWIGLU, residual=residual, shared=(shared_up, shared_down))


def static_obstacle(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
) -> str | None:  # fmt: skip
    """Why no machine could run this in one call, or None."""
    (n, n_chosen), inner, size = expert_ids.shape, down.shape[2], shared_down.shape[1]
    if n > MAX_ROWS or are_rows_alone():
        return Slower(f"{n} rows: products apart are as fast from {MAX_ROWS + 1} on, and alike for all numbers of rows")
    if size % inner:
        return f"the shared inner vector has {size} numbers, not a multiple of an expert's {inner}"
    if n_chosen + size // inner > MAX_CHOSEN:
        return f"{n_chosen} experts and {size // inner} shared parts: at most {MAX_CHOSEN}"
    for name, tensor in (("shared_up", shared_up), ("shared_down", shared_down)):
        if tensor.data_ptr() % hopper.ALIGNMENT_BYTES:
            return f"the address of {name} is not a multiple of {hopper.ALIGNMENT_BYTES} bytes"
    return None


def prepare(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
) -> SharedLaunch | str:  # fmt: skip
    """The call ready for these arguments, or why it is not for this kernel. Compiles what is new (seconds)."""
    found = static_obstacle(x, expert_ids, weights, up, down, shared_up, shared_down, residual)
    if found is not None:
        return found
    alone = hopper.prepare(x, expert_ids, weights, up, down, SWIGLU, residual=residual)
    if isinstance(alone, str):
        return alone
    n_shared = shared_down.shape[1] // down.shape[2]
    launch = hopper.prepared(hopper.shape_of(expert_ids, down, n_shared), x.dtype, x.device)
    if isinstance(launch, str):
        return launch
    if not isinstance(launch.plan, FewPlan):
        return Slower("these are experts for the kernel for many rows")
    return SharedLaunch(launch)


def experts_with_shared(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
    shared_up: torch.Tensor, shared_down: torch.Tensor, residual: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """See op.py. Raises ValueError where the kernel does not take the arguments."""
    arguments = (x, expert_ids, weights, up, down, shared_up, shared_down, residual)
    launch = prepare(*arguments)
    if isinstance(launch, str):
        raise ValueError(f"these experts are not for the Hopper kernels: {launch}")
    return launch(*arguments)
