"""Sampling on CPU: floors of truncated rows in numpy, the choice in the native library, else in torch.

Invariant: a row goes through the same arithmetic in any batch (reductions run inside a row, in blocks of fixed size).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from quire.core.plan import MASK_WORD_BITS
from quire.kernels import native
from quire.kernels.sample.draw import DROP, EMPTY, FINE, INVERSE, NON_FINITE, TOP_K, TOP_P, UNIFORM, Choice, TokenMasks
from quire.kernels.sample.lines_torch import lines
from quire.kernels.sample.penalties import penalise, widen

__all__ = ["choose_by", "lines", "penalise", "widen"]

BLOCK = 128
"""Columns whose weights are summed first; the chosen block is then computed again."""
CHUNK = 1 << 18
"""Logits worked on at a time by one thread: 1 MiB, so that the weights stay in its cache."""
SHARED_CHUNK = 1 << 24
"""The same for several threads: 64 MiB, because each operation ends in a barrier, and that can cost a time slice."""


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BYTE_PENALTIES = np.where(_BITS, np.float32(0), np.float32(-np.inf)).astype(np.float32)
"""float32 [256, 8]: what each byte of a mask adds to eight logits."""


class NativeChoice(ctypes.Structure):
    """QuireChoice in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "uniforms", "inverses", "floors", "token_ids", "status")),
        *((name, ctypes.c_int64) for name in ("logits_row", "width", "n_rows", "n_threads")),
    )


def choose_by(
    logits: torch.Tensor, controls: torch.Tensor, out: Choice, masks: TokenMasks | None = None, _truncates: bool = True
) -> None:
    """See `op.choose_by`."""
    if masks is not None:
        _restrict(logits, masks)
    library = native.library()
    if library is None or not (out.token_ids.is_contiguous() and out.status.is_contiguous()):
        _choose_in_torch(logits, controls, out)
        return
    lines = controls.numpy()
    truncated = lines[INVERSE] > 0
    truncated &= (lines[DROP] > -np.inf) | (lines[TOP_K] > 0) | (lines[TOP_P] < 1)
    floors = _floors(logits, np.arange(len(logits)), lines, truncated) if truncated.any() else None
    call = NativeChoice(
        logits.data_ptr(), lines[UNIFORM].ctypes.data, lines[INVERSE].ctypes.data,
        None if floors is None else floors.ctypes.data, out.token_ids.data_ptr(), out.status.data_ptr(),
        logits.stride(0), logits.shape[1], len(logits), torch.get_num_threads(),
    )  # fmt: skip
    library.quire_choose(ctypes.byref(call))


def _restrict(logits: torch.Tensor, masks: TokenMasks) -> None:
    """-inf in place for what is not allowed; by whole bytes, ten times as fast as masked_fill."""
    lines = masks.lines.numpy()
    rows = np.flatnonzero(lines >= 0)
    n_words = -(-logits.shape[1] // MASK_WORD_BITS)
    given = masks.bits.numpy()[lines[rows], :n_words]
    bits = np.zeros((len(rows), n_words), np.int32)
    bits[:, : given.shape[1]] = given
    spread = _BYTE_PENALTIES.take(bits.view(np.uint8).ravel(), axis=0)
    penalties = torch.from_numpy(spread.reshape(len(rows), n_words * MASK_WORD_BITS)[:, : logits.shape[1]])
    if len(rows) == len(logits):  # as in a step in which every sequence is masked
        logits.add_(penalties)
    else:
        logits.index_add_(0, torch.from_numpy(rows), penalties)


def _choose_in_torch(logits: torch.Tensor, controls: torch.Tensor, out: Choice) -> None:
    """Whole rows go through torch, which has threads; small arrays through numpy: it is quicker."""
    x, lines = logits.numpy(), controls.numpy()
    random = lines[INVERSE] > 0
    token_ids, peaks = np.zeros(len(x), np.int64), np.zeros(len(x), np.float32)
    if not random.all():
        token_ids = x.argmax(1)  # the first of equal maxima and the first NaN, in a tenth of torch.argmax's time
        peaks = x[np.arange(len(x)), token_ids]
    if random.any():
        rows = np.flatnonzero(random)
        token_ids[rows], peaks[rows] = _draw(logits, rows, lines[:, rows])
    status = np.where(peaks < np.inf, np.where(peaks > -np.inf, FINE, EMPTY), NON_FINITE).astype(np.uint8)
    out.token_ids.numpy()[:] = np.where(status == FINE, token_ids, 0)
    out.status.numpy()[:] = status


def _draw(logits: torch.Tensor, rows: np.ndarray, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, int64, and largest logits of some rows, whose controls are `lines`."""
    n_rows, width = len(rows), logits.shape[1]
    inverse = torch.from_numpy(lines[INVERSE].astype(np.float32))[:, None]
    truncated = (lines[DROP] > -np.inf) | (lines[TOP_K] > 0) | (lines[TOP_P] < 1)
    floors = torch.from_numpy(_floors(logits, rows, lines, truncated))[:, None] if truncated.any() else None
    peaks = torch.empty(n_rows, 1)
    sums = torch.empty(n_rows, -(-width // BLOCK))
    n_chunk = max(1, (CHUNK if torch.get_num_threads() == 1 else SHARED_CHUNK) // width)
    for start in range(0, n_rows, n_chunk):
        part = slice(start, start + n_chunk)
        chunk = _rows(logits, rows[part])
        torch.amax(chunk, -1, keepdim=True, out=peaks[part])
        weights = _weights(chunk, peaks[part], inverse[part], None if floors is None else floors[part])
        _sum_blocks(weights, sums[part])
    cumulative = sums.numpy().cumsum(1, dtype=np.float64)
    blocks, rests = _first_above(cumulative, lines[UNIFORM] * cumulative[:, -1])
    cells = blocks[:, None] * BLOCK + np.arange(BLOCK)
    chosen = torch.from_numpy(logits.numpy()[rows[:, None], np.minimum(cells, width - 1)])
    of_cells = _weights(chosen, peaks, inverse, floors).numpy()
    of_cells[cells >= width] = 0
    within, _ = _first_above(of_cells.cumsum(1, dtype=np.float64), rests)
    return np.minimum(blocks * BLOCK + within, width - 1), peaks[:, 0].numpy()


def _rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Some rows, without a copy where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    return logits[rows]


def _weights(x: torch.Tensor, peaks: torch.Tensor, inverse: torch.Tensor, floors: torch.Tensor | None) -> torch.Tensor:
    """exp((x - peak) / temperature), 0 where x < floor. The peak goes first, since x / temperature may overflow."""
    weights = torch.sub(x, peaks).mul_(inverse).exp_()
    if floors is not None:  # a product with 0 or 1 takes a tenth of the time of masked_fill
        weights.mul_(torch.ge(x, floors, out=torch.empty_like(x)))
    return weights


def _sum_blocks(weights: torch.Tensor, out: torch.Tensor) -> None:
    n_full = weights.shape[1] // BLOCK
    blocks = weights[:, : n_full * BLOCK].unflatten(1, (n_full, BLOCK))  # type: ignore[no-untyped-call]
    torch.sum(blocks, -1, out=out[:, :n_full])
    if n_full < out.shape[1]:
        out[:, n_full] = weights[:, n_full * BLOCK :].sum(-1)


def _first_above(cumulative: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row, the first index where cumulative [m, n] exceeds its target [m], and the target beyond its start.

    A target that rounding put at the total counts as just below it, so that the entry found always added something.
    """
    targets = np.minimum(targets, np.nextafter(cumulative[:, -1], 0))
    found = np.minimum((cumulative <= targets[:, None]).sum(1), cumulative.shape[1] - 1)
    before = np.where(found > 0, cumulative[np.arange(len(found)), found - 1], 0)
    return found, targets - before


def _floors(logits: torch.Tensor, rows: np.ndarray, lines: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """float32 [m]: the smallest logit that each row keeps."""
    floors = np.full(len(rows), -np.inf, np.float32)
    for i in np.flatnonzero(truncated):
        floors[i] = _floor(logits[rows[i]].numpy(), lines[:, i])
    return floors


def _floor(x: np.ndarray, control: np.ndarray) -> float:
    """The floor of a row whose logits are x [width] and whose controls are `control` [N_CONTROLS]."""
    peak, top_k = float(x.max()), int(control[TOP_K])
    if not np.isfinite(peak):
        return -np.inf
    floor = peak + float(control[DROP])
    if 0 < top_k < len(x):
        floor = max(floor, _kth_largest(x, top_k))
    if control[TOP_P] < 1:
        kept = x if floor == -np.inf else _where(x, x >= np.float32(floor))
        floor = _nucleus_floor(kept, peak, float(control[INVERSE]), float(control[TOP_P]))
    return floor


def _kth_largest(x: np.ndarray, k: int) -> float:
    n_full = len(x) // BLOCK
    if k < n_full:  # k blocks hold a value as large as the k-th largest of the blocks' maxima, and few values are
        peaks = torch.from_numpy(x[: n_full * BLOCK]).view(n_full, BLOCK).amax(1).numpy()
        x = _where(x, x >= np.partition(peaks, n_full - k)[n_full - k])
    return float(np.partition(x, len(x) - k)[len(x) - k])


def _nucleus_floor(x: np.ndarray, peak: float, inverse: float, top_p: float) -> float:
    """Largest value t such that the weight of x >= t is at least `top_p` of the weight of all x."""
    with np.errstate(over="ignore"):  # -inf is what a far smaller logit should become
        weights = np.exp((x - np.float32(peak)) * np.float32(inverse))
    total = float(weights.sum())
    # all logits that weigh less than this weigh less than 1 - top_p together, so they cannot be needed
    candidates = np.sort(_where(x, weights >= (1 - top_p) * total / len(x)))[::-1]
    cumulative = np.exp((candidates - np.float32(peak)) * np.float32(inverse)).cumsum(dtype=np.float64)
    found = int(np.searchsorted(cumulative, top_p * total, side="left"))
    return float(candidates[min(found, len(candidates) - 1)])


def _where(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return x[np.flatnonzero(kept)]  # twice as fast as x[kept]
