"""One decode step of a batch: sequences of any length, keys and values in pages, one plan for all layers.

Run: python examples/paged_decode.py (CUDA if there is a device, else the CPU)
"""

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention import reference, variants

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n_layers, n_q_heads, n_kv_heads, head_dim, page_size = 4, 8, 2, 64, 16
kv_lens = np.array([700, 33, 1, 250, 64], np.int32)  # tokens of each sequence, the one of this step included
n_seqs = len(kv_lens)

# Pages are handed out in any order. Row s of the table lists the pages of sequence s.
n_pages = -(-kv_lens // page_size)
free = np.random.default_rng(0).permutation(int(n_pages.sum())).astype(np.int32)
page_table = np.zeros((n_seqs, n_pages.max()), np.int32)
for row, pages in zip(page_table, np.split(free, np.cumsum(n_pages)[:-1]), strict=True):
    row[: len(pages)] = pages

# The plan: one new token (row of q) for each sequence. Made once a step, on the host.
plan = attention.plan(
    q_indptr=np.arange(n_seqs + 1, dtype=np.int32),
    kv_lens=kv_lens,
    slots=np.arange(n_seqs, dtype=np.int32),
    page_table=torch.from_numpy(page_table).to(device),
    page_size=page_size,
    n_q_heads=n_q_heads,
    n_kv_heads=n_kv_heads,
    head_dim=head_dim,
)
variant = variants.causal(scale=head_dim**-0.5)

torch.manual_seed(0)
for layer in range(n_layers):
    pool = (2, len(free), n_kv_heads, page_size, head_dim)
    k, v = torch.randn(pool, device=device).bfloat16()
    q = torch.randn(n_seqs, n_q_heads, head_dim, device=device).bfloat16()
    out = attention.run(q, k, v, plan, variant)

    expected = torch.empty_like(q, dtype=torch.float64)
    reference.run(q.double(), k.double(), v.double(), plan, variant, expected, None)
    error = float((out - expected).abs().max())
    print(f"layer {layer}: out {tuple(out.shape)} on {device.type}, {error:.1e} from the float64 reference")
    assert error <= reference.TOLERANCE[torch.bfloat16]
