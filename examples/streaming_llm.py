"""StreamingLLM (Xiao et al. 2024): endless text in a cache of fixed size; the first tokens and the latest ones stay.

To drop tokens is to drop their pages from the table. Keys are stored unrotated, and the variant rotates them while it
reads, by their place in the cache (section 3.2): no position ever exceeds the cache.
Run: python examples/streaming_llm.py (CUDA if there is a device, else the CPU)
"""

import torch

from quire.kernels import attention
from quire.kernels.attention import reference, variants

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n_tokens, n_heads, head_dim, page_size, max_pages = 150, 4, 64, 4, 8  # one page of first tokens, seven of the latest
heads = {"n_q_heads": n_heads, "n_kv_heads": n_heads, "head_dim": head_dim}
angles = torch.outer(torch.arange(max_pages * page_size), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim))
variant = variants.rotary(head_dim**-0.5, torch.cat((angles.cos(), angles.sin()), dim=1).to(device))


def rotated(x: torch.Tensor, first: int) -> torch.Tensor:
    """x [n, n_heads, head_dim] at positions first, first + 1, ..."""
    turns = torch.polar(torch.ones_like(angles), angles)[first : first + len(x), None].to(device)
    a, b = x.double().chunk(2, dim=-1)
    y = torch.complex(a, b) * turns
    return torch.cat((y.real, y.imag), dim=-1)


torch.manual_seed(0)
text_q, text_k, text_v = torch.randn(3, n_tokens, n_heads, head_dim, device=device).bfloat16()
k, v = torch.zeros(2, max_pages, n_heads, page_size, head_dim, dtype=torch.bfloat16, device=device)
free, table, tokens, worst = list(range(max_pages)), [], [], 0.0
for token in range(n_tokens):
    if token % page_size == 0:  # a new page, or the oldest after the first again
        if not free:
            free.append(table.pop(1))
            del tokens[page_size : 2 * page_size]
        table.append(free.pop())
    page, offset = table[-1], token % page_size
    k[page, :, offset], v[page, :, offset] = text_k[token], text_v[token]
    tokens.append(token)

    page_table = torch.tensor([table], dtype=torch.int32, device=device)
    plan = attention.plan([0, 1], [len(tokens)], [0], page_table, page_size=page_size, **heads, variant=variant)
    out = attention.run(text_q[token : token + 1], k, v, plan, variant)

    keys, query = rotated(text_k[tokens], 0), rotated(text_q[token : token + 1], len(tokens) - 1)
    weights = torch.softmax(torch.einsum("qhd,khd->hqk", query, keys) * variant.scale, dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, text_v[tokens].double())
    worst = max(worst, float((out - expected).abs().max()))

print(
    f"token {token} sees {tokens[:page_size]} and {tokens[page_size]} .. {token}, at positions 0 .. {len(tokens) - 1}"
)
print(f"{n_tokens} tokens through room for {max_pages * page_size} on {device.type}: {worst:.1e} from torch in float64")
assert worst <= reference.TOLERANCE[torch.bfloat16]
