"""Causal attention over paged keys and values, for any mix of spans: plan once a step, run once a layer."""

from quire.kernels.attention.op import plan, plan_buffers, run
from quire.kernels.attention.plan import AttnPlan, PlanBuffers, Variant

__all__ = ["AttnPlan", "PlanBuffers", "Variant", "plan", "plan_buffers", "run"]
