"""Causal attention over paged keys and values, for any mix of spans: plan once a step, run once a layer."""

from quire.kernels.attention.op import plan, run
from quire.kernels.attention.plan import AttnPlan, Variant

__all__ = ["AttnPlan", "Variant", "plan", "run"]
