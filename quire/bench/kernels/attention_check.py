"""Checks of attention: each implementation and variant against the float64 reference on small mixed batches.

Whatever no token owns is NaN, pages are in random order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from quire.bench.kernels.attention import QWEN, able, cases_of
from quire.bench.kernels.case import Check, Setting
from quire.bench.kernels.paged import LLAMA, Batch, Inputs
from quire.bench.kernels.variants import NAMED, example
from quire.kernels import catalog
from quire.kernels.attention import reference

QUICK = ("causal", "soft_cap")
SPANS = ((300, 1), (77, 77), (1, 1), (513, 40), (1, 0))


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Every variant in pages, and plain causal in rows, with a shared prefix, and in pages and heads as cases have."""
    heads = LLAMA if setting.device.type == "cuda" else QWEN
    mixed = Batch(SPANS, heads=heads)
    listed = {name: (name, mixed) for name in NAMED}
    listed["causal shared"] = ("causal", Batch(((300, 1), (277, 1), (257, 1)), heads=heads, n_shared=256))
    if setting.device.type == "cuda":
        coded = Batch(SPANS, heads=heads, coded=True)
        listed |= {f"{name} e4m3": (name, coded) for name in ("window", "sinks", "mask")}
    for entry in cases_of(setting.device.type):
        listed.setdefault(entry.kind, (entry.variant, dataclasses.replace(entry.batch, spans=SPANS, n_shared=0)))
    for implementation in catalog.runnable("attention", setting.device.type, "run"):
        if implementation.name != "reference":
            for what, (variant, batch) in listed.items():
                error = functools.partial(_error, setting, implementation.name, variant, batch)
                tolerance = reference.TOLERANCE[setting.dtype]
                yield Check(op, what, implementation.name, error, tolerance, quick=what in QUICK)


def _error(setting: Setting, implementation: str, variant_name: str, batch: Batch) -> float:
    """Largest absolute difference, NaN if anything is."""
    inputs = Inputs(batch, setting, n_copies=1, poison=True)
    variant = example(variant_name, batch, setting.device)
    plan = inputs.plan(variant)
    (k, v), q = inputs.pools[0], inputs.q
    module = able(implementation, plan, variant, setting.dtype, k.dtype)
    out, expected = torch.empty_like(q), torch.empty(q.shape, dtype=torch.float64, device=q.device)
    module.run(q, k, v, plan, variant, out, None)
    reference.run(q.double(), k.double(), v.double(), plan, variant, expected, None)
    return float((out.double() - expected).abs().max())
