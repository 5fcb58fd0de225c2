"""Many sequences with one long prefix (a system prompt) in the same pages: read once for all, the answer is the same.

Run: python examples/shared_prefix.py (CUDA if there is a device, else the CPU; times are taken on CUDA)
"""

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention import SharedPrefix, reference, variants

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
n_seqs, n_shared, n_own = 32, 32768 if cuda else 1024, 128
heads, page_size = {"n_q_heads": 32, "n_kv_heads": 8, "head_dim": 128}, 16

# Every row of the table begins with the pages of the prefix and goes on with pages of its own.
prefix = np.arange(n_shared // page_size, dtype=np.int32)
own = len(prefix) + np.arange(n_seqs * n_own // page_size, dtype=np.int32).reshape(n_seqs, -1)
page_table = np.concatenate((np.broadcast_to(prefix, (n_seqs, len(prefix))), own), axis=1)

torch.manual_seed(0)
k, v = torch.randn(2, own.max() + 1, heads["n_kv_heads"], page_size, heads["head_dim"], device=device).bfloat16()
q = torch.randn(n_seqs, heads["n_q_heads"], heads["head_dim"], device=device).bfloat16()
variant = variants.causal(scale=heads["head_dim"] ** -0.5)


def planned(shared: list[SharedPrefix]) -> attention.AttnPlan:
    rows = np.arange(n_seqs + 1, dtype=np.int32)
    table = torch.from_numpy(page_table).to(device)
    kv_lens = np.full(n_seqs, n_shared + n_own, np.int32)
    return attention.plan(rows, kv_lens, rows[:-1], table, page_size=page_size, **heads, shared=shared)


def seconds(plan: attention.AttnPlan, n_runs: int = 50) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for run in range(n_runs + 5):
        if run == 5:
            start.record()
        attention.run(q, k, v, plan, variant)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / n_runs


apart, together = planned([]), planned([SharedPrefix(range(n_seqs), n_shared)])
outs = [attention.run(q, k, v, plan, variant) for plan in (apart, together)]
error = float((outs[0] - outs[1]).abs().max())
print(f"{n_seqs} sequences, {n_shared} tokens shared, {n_own} of their own: the two answers differ by {error:.1e}")
assert error <= reference.TOLERANCE[torch.bfloat16]
if cuda:
    times = [seconds(plan) for plan in (apart, together)]
    print(f"each reads its prefix: {times[0] * 1e6:.0f} us; read once: {times[1] * 1e6:.0f} us")
