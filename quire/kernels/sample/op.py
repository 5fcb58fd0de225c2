"""Public sampling op. Checks shapes and picks the implementation by device."""

from __future__ import annotations

import torch

from quire.kernels.sample.draw import N_CONTROLS, N_HISTORY, Choice, Draw, TokenMasks
from quire.kernels.selector import select
from quire.kernels.transfer import upload

CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(logits: torch.Tensor, draw: Draw) -> Choice:
    """`choose_by` with the controls of `draw`, one entry a row, sent to the device; nothing waits for it."""
    return choose_by(logits, upload(draw.controls(), logits.device))


def choose_by(
    logits: torch.Tensor,
    controls: torch.Tensor,
    out: Choice | None = None,
    masks: TokenMasks | None = None,
    *,
    truncates: bool = True,
) -> Choice:
    """One token for each row of `logits` [m, width] with contiguous rows: float32, on CUDA bfloat16 or float16, too.

    controls: float64 [N_CONTROLS, m], each line contiguous, as `Draw.controls` makes them, on the logits' device (a
    slice of a wider buffer will do). out: int32 and uint8 [m] to write and return. On CUDA no decision of the host
    depends on values, so a captured graph of this call serves any later contents of `logits` and `controls`.

    Greedy rows: the largest logit, the lowest id on ties. Random rows: the first token, in vocabulary order, at which
    the cumulative weight exceeds `uniform` times the total. The weight of a logit x is exp((x - max) / temperature),
    and 0 unless it survives, in this order:
      min_p  weight >= min_p times the largest weight
      top_k  x >= the k-th largest x (ties at the border all stay, as in transformers and vLLM)
      top_p  the weight of strictly larger logits is < top_p of what top_k left (Holtzman et al. 2019; ties at the
             border all stay)
    truncates: False promises that top_k, top_p and min_p keep everything in every row, which saves launches on CUDA.
    A row's result does not depend on the other rows, bit for bit. -inf logits are never chosen. masks, on the logits'
    device: minus infinity is added to what they do not allow, in `logits`, before all else. Raises ValueError on a
    mismatch of shapes or types.
    """
    dtypes = CUDA_DTYPES if logits.is_cuda else CUDA_DTYPES[:1]
    if logits.dim() != 2 or logits.dtype not in dtypes or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be [m, width], rows contiguous, {dtypes}: {tuple(logits.shape)} {logits.dtype}")
    n_rows, width = logits.shape
    if controls.shape != (N_CONTROLS, n_rows) or width == 0:
        raise ValueError(
            f"controls {tuple(controls.shape)} for logits {tuple(logits.shape)}: [{N_CONTROLS}, {n_rows}] are needed, "
            "one draw a row, and at least one column"
        )
    if controls.dtype != torch.float64 or (n_rows > 1 and controls.stride(1) != 1):
        raise ValueError(f"controls must be float64, lines contiguous: {controls.dtype}, strides {controls.stride()}")
    if masks is not None and (masks.lines.shape != (n_rows,) or (masks.bits.dim(), masks.bits.stride(-1)) != (2, 1)):
        lines, bits = tuple(masks.lines.shape), tuple(masks.bits.shape)
        raise ValueError(f"mask lines {lines} and bits {bits}: [{n_rows}] and contiguous lines of words are needed")
    if out is None:
        ids = torch.empty(n_rows, dtype=torch.int32, device=logits.device)
        out = Choice(ids, torch.empty(n_rows, dtype=torch.uint8, device=logits.device))
    if n_rows:
        select("sample", "choose_by", logits)(logits, controls, out, masks, truncates)
    return out


def lines(logits: torch.Tensor, targets: torch.Tensor, k: int) -> torch.Tensor:
    """What is reported of some tokens and of the k most probable ones, by the distribution of `logits` as they are.

    logits: [r, width] with contiguous rows, types as in `choose_by`; targets: int32 [r]; k <= width. Returns int32
    [r, 1 + k, 2], as `cells.pack` lays them out, natural log: of the target, 1 + the number of larger logits and its
    log-probability; id and log-probability of the most probable tokens, of equally probable ones the lowest id first,
    whatever k is. The host waits for nothing. A row does not depend on the others, nor what it says of its target on k.
    Raises ValueError on a mismatch.
    """
    n_rows, width = logits.shape
    if targets.shape != (n_rows,) or targets.dtype is not torch.int32 or not 0 <= k <= width:
        raise ValueError(f"targets {tuple(targets.shape)} {targets.dtype}, k {k}: int32 [{n_rows}], at most {width}")
    found: torch.Tensor = select("sample", "lines", logits)(logits, targets, k)
    return found


def widen(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`logits` [m, width] with contiguous rows, as float32: a copy unless they are. For what is changed one by one.

    out: contiguous float32 [m, width] to write and return, whatever they are.
    """
    if logits.dtype is torch.float32 or not logits.numel():
        return logits.float() if out is None else out.copy_(logits)
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    select("sample", "widen", logits)(logits, out)
    return out


def penalise(logits: torch.Tensor, histories: torch.Tensor, tokens: torch.Tensor, longest: int) -> None:
    """Change some rows of `logits` float32 [m, width] in place by what their sequences hold already.

    For a token in prompt or output: x / repetition if x > 0 else x * repetition (Keskar et al. 2019). Then, for a token
    in the output: x - frequency * count - presence.
    histories: float64 [N_HISTORY, e], each line contiguous: row of logits, which no other history has, row of tokens,
    position of the token to be chosen, length of the prompt, then the strengths, rounded to float32: repetition,
    frequency, presence. tokens: int32 [n, >= longest]; entries at or after the position are not used. Both are on the
    logits' device. longest: no position is larger. On CUDA no decision of the host depends on more than that, so a
    captured graph of this call serves later histories. Nothing is remembered, so nothing can go stale.
    Raises ValueError on a mismatch of shapes or types.
    """
    n_rows = histories.shape[-1]
    if histories.shape != (N_HISTORY, n_rows) or (n_rows > 1 and histories.stride(1) != 1):
        shape, strides = tuple(histories.shape), histories.stride()
        raise ValueError(f"histories {shape}, strides {strides}: [{N_HISTORY}, e] with contiguous lines are needed")
    if histories.dtype is not torch.float64 or not 0 <= longest <= tokens.shape[1]:
        raise ValueError(f"histories {histories.dtype} of up to {longest} of {tokens.shape[1]} tokens: float64 it is")
    if logits.dim() != 2 or logits.dtype is not torch.float32 or tokens.dtype is not torch.int32:
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}, tokens {tokens.dtype}: float32 rows and int32")
    if n_rows:
        select("sample", "penalise", logits)(logits, histories, tokens, longest)
