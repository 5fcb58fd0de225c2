"""The commonest step, cut in one native call: one row a span over pages, all keys of its window, nothing shared.

The result is what tiles.py's `cut_any` gives, in a tenth of its time. Owns no decision: where keys are cut is
stream.py's, which csrc/cpu/plans.cpp repeats.
"""

from __future__ import annotations

import ctypes

import numpy as np

from quire.kernels import native
from quire.kernels.attention.schedule.pieces import FIELDS, WorkList
from quire.kernels.attention.schedule.plan import AttnPlan, Layout

_POINTERS = "kv_lens", "slots", "small", "merges", "parts", "queue"
_SIZES = "n_spans", "n_kv_heads", "group", "window", "table_stride", "n_ctas"
_COUNTS = "n_small", "n_merges", "n_parts"
_NONE = np.zeros(0, np.int32)
_NO_LARGE, _NO_ROWS = _NONE.reshape(0, FIELDS), _NONE.reshape(0, 2)


class _DecodeWork(ctypes.Structure):
    """QuireDecodeWork in csrc/cpu/quire_cpu.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_COUNTS)),
    )


def fits(plan: AttnPlan, shares: bool) -> bool:
    """Whether the step is such a step. shares: shared prefixes are read together where that pays."""
    if plan.layout is not Layout.PAGED or plan.n_first or plan.batch_invariant or not plan.causal:
        return False
    n_spans = len(plan.spans.kv_lens)
    indptr = plan.spans.q_indptr
    if (shares and plan.shared) or not n_spans or indptr[-1] != n_spans:
        return False
    return bool((indptr[1:] > indptr[:-1]).all())


def cut(plan: AttnPlan, n_ctas: int) -> WorkList | None:
    """The work of a step that `fits`; the query heads of a KV head fit a small line. None without a native library."""
    library = native.library()
    if library is None:
        return None
    spans, heads = plan.spans, plan.heads
    n_spans = len(spans.kv_lens)
    small = np.empty((n_spans * heads.n_kv_heads + n_ctas, FIELDS), np.int32)
    merges, parts, queue = (np.empty(shape, np.int32) for shape in ((n_ctas, 4), 2 * n_ctas, n_ctas + 1))
    work = _DecodeWork(
        *(array.ctypes.data for array in (spans.kv_lens, spans.kv_at, small, merges, parts, queue)),
        *(n_spans, heads.n_kv_heads, heads.group, plan.window, plan.paged_table.stride(0), n_ctas),
    )
    library.quire_decode_work(ctypes.addressof(work))
    n_parts = work.n_parts
    return WorkList(
        small[: work.n_small], _NO_LARGE, queue, _NO_ROWS, merges[: work.n_merges], parts[:n_parts], _NONE,
        n_parts * heads.group,
    )  # fmt: skip
