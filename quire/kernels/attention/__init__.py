"""Attention over paged or ragged keys, for any mix of spans and any variant: plan once a step, run once a layer."""

from quire.kernels.attention.merge import merge
from quire.kernels.attention.op import plan, plan_buffers, plan_ragged, run
from quire.kernels.attention.schedule.plan import AttnPlan, Layout, PlanBuffers, SharedPrefix
from quire.kernels.attention.variant import Variant, expression, variants

__all__ = [
    "AttnPlan",
    "Layout",
    "PlanBuffers",
    "SharedPrefix",
    "Variant",
    "expression",
    "merge",
    "plan",
    "plan_buffers",
    "plan_ragged",
    "run",
    "variants",
]
