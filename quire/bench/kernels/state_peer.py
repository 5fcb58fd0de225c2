"""flash-linear-attention's gated delta rule, called with what ours is called with.

Its kernels take unequal numbers of key and value heads, normalise keys and queries, and make decays and weights
themselves, as ours do. States lie by sequence, not by line, and what is left of them is written elsewhere: where its
result is compared it is copied, where it is timed it is not. Owns the calls; measures nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from quire.bench.kernels.case import NotRun

NAME: Final = "fla"


def call_of(
    inputs: Sequence[torch.Tensor], state: torch.Tensor, n_seqs: int
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Computes (outputs [n_seqs, rows of each, heads, e], states behind them) of `n_seqs` sequences of one length.
    inputs: q, k, v, a, b, a_log, dt_bias, as of `quire.kernels.state.scan_delta`. Raises NotRun where it is not
    installed."""
    if importlib.util.find_spec("fla") is None:
        raise NotRun("flash-linear-attention is not installed")
    ops: Any = importlib.import_module("fla.ops.gated_delta_rule")
    *rows, a_log, dt_bias = inputs
    single = len(rows[0]) == n_seqs
    run = ops.fused_recurrent_gated_delta_rule if single else ops.chunk_gated_delta_rule
    q, k, v, a, b = (one.unflatten(0, (n_seqs, -1)) for one in rows)  # type: ignore[no-untyped-call]
    return functools.partial(
        run, q, k, v, g=a, beta=b, A_log=a_log, dt_bias=dt_bias, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip


def tune_anew() -> None:
    """Its kernels keep the blocks that were best at the first sizes that they met, which may be small: forgets them."""
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    for name, module in list(sys.modules.items()):
        for kernel in list(vars(module).values()) if name.startswith("fla.") else ():
            while kernel is not None and not isinstance(kernel, autotuner):
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None
            if kernel is not None:
                kernel.cache.clear()
                kernel.cache_results = False


def scan_delta(*arguments: Any, n_seqs: int) -> torch.Tensor:
    """As ours: the states are left where they were. The spans, the last argument, are those of `n_seqs` lines in
    order."""
    *inputs, state, _ = arguments
    out, left = call_of(inputs, state, n_seqs)()
    state.copy_(left)
    return out.flatten(0, 1)
