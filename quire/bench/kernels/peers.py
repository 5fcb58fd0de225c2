"""Others' attention on the same inputs: torch's scaled_dot_product_attention, FlashInfer. All of them optional.

Torch's get dense, contiguous keys for free; FlashInfer reads the same pages.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.bench.kernels.case import Contender
from quire.bench.kernels.paged import Inputs
from quire.bench.kernels.timing import Call

BACKENDS = {
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WORKSPACE_BYTES = 256 << 20


def peers(inputs: Inputs, all_backends: bool) -> Iterator[Contender]:
    """Those that can run plain causal attention on these inputs. all_backends: torch's slower ones too."""
    on_cuda = inputs.setting.device.type == "cuda"
    if inputs.batch.uniform:
        chosen = BACKENDS if on_cuda and all_backends else ["torch cudnn" if on_cuda else "torch flash"]
        for name in chosen:
            yield Contender(f"{name} (dense)", functools.partial(dense_calls, inputs, BACKENDS[name]), is_peer=True)
    if on_cuda and not inputs.batch.ragged and has_flashinfer():
        yield Contender("flashinfer", functools.partial(flashinfer_calls, inputs), is_peer=True)


def has_flashinfer() -> bool:
    """True if FlashInfer can be imported."""
    return importlib.util.find_spec("flashinfer") is not None


def dense_calls(inputs: Inputs, backend: SDPBackend) -> Sequence[Call]:
    """Causal attention of torch; of one row (decode) it needs no mask."""
    q, causal = inputs.dense_q(), inputs.batch.spans[0][1] > 1
    group = inputs.batch.heads.group
    # The efficient backend knows no groups of heads.
    repeat = group if backend is SDPBackend.EFFICIENT_ATTENTION else 1
    pools = [tuple(x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in pair) for pair in inputs.dense]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return [functools.partial(call, k, v) for k, v in pools]


def flashinfer_calls(inputs: Inputs) -> Sequence[Call]:
    """FlashInfer's paged decode (tensor cores) or prefill wrapper."""
    flashinfer = importlib.import_module("flashinfer")
    batch, device = inputs.batch, inputs.setting.device
    counts = torch.from_numpy(-(-batch.kv_lens // batch.page_size)).int()
    indptr = F.pad(counts.cumsum(0), (1, 0)).int().to(device)
    indices = torch.cat([row[:count] for row, count in zip(inputs.table, counts.tolist(), strict=True)]).contiguous()
    last = torch.from_numpy((batch.kv_lens - 1) % batch.page_size + 1).int().to(device)
    heads = (batch.heads.n_q_heads, batch.heads.n_kv_heads, batch.heads.head_dim)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    types = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.q.dtype}
    if batch.lengths.max() == 1:
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, batch.page_size, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        q_indptr = torch.from_numpy(batch.q_indptr()).to(device)
        wrapper.plan(q_indptr, indptr, indices, last, *heads, batch.page_size, causal=True, **types)
    out = torch.empty_like(inputs.q)
    run: Callable[..., object] = wrapper.run
    return [functools.partial(run, inputs.q, pool, out=out) for pool in inputs.pools]
