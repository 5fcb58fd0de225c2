"""An attention of your own: a few lines of Python, lowered to Triton, CUDA C++ or C++ by the library.

Run: python examples/own_variant.py (CUDA if there is a device, else the CPU)
"""

import itertools

import numpy as np
import torch

from quire.kernels import attention
from quire.kernels.attention import reference
from quire.kernels.attention.variant.expression import as_float, log

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
n_heads, head_dim = 4, 64


# The variant: logits fall with the logarithm of the distance, faster in some heads than in others.
def faded(logits, site, p):
    distance = as_float(site.q_pos - site.k_pos)
    return logits - p.rate[site.q_head] * log(1.0 + distance)


rate = torch.tensor([0.0, 0.5, 1.0, 4.0], device=device)
variant = attention.Variant(scale=head_dim**-0.5, logits_transform=faded, params={"rate": rate})

# Two prompts, one after the other in q, k and v: no pages, no padding.
starts = np.array([0, 300, 420], np.int32)
plan = attention.plan_ragged(
    starts, starts, n_q_heads=n_heads, n_kv_heads=n_heads, head_dim=head_dim, device=device, variant=variant
)
torch.manual_seed(0)
q, k, v = torch.randn(3, starts[-1], n_heads, head_dim, device=device).bfloat16()
out = attention.run(q, k, v, plan, variant)

# The same in plain torch, prompt by prompt, in float64.
for start, end in itertools.pairwise(starts):
    queries, keys, values = (x[start:end].double().transpose(0, 1) for x in (q, k, v))
    position = torch.arange(end - start, device=device)
    distance = position[:, None] - position
    logits = queries @ keys.mT * head_dim**-0.5 - rate[:, None, None] * torch.log(1.0 + distance.clamp(min=0))
    expected = torch.softmax(logits.masked_fill(distance < 0, float("-inf")), dim=-1) @ values
    error = float((out[start:end].transpose(0, 1) - expected).abs().max())
    print(f"prompt of {end - start} tokens on {device.type}: {error:.1e} from torch in float64")
    assert error <= reference.TOLERANCE[torch.bfloat16]

print("as an expression:", variant.program.hooks["logits_transform"].text())
