"""Recurrent token mixers: short convolutions, the scan of Mamba-2, the gated delta rule; a state for each sequence."""

from quire.kernels.state.op import convolve, norm_gated, scan_delta, scan_ssm
from quire.kernels.state.spans import StateSpans, plan_spans, single_rows, spans_of

__all__ = ["StateSpans", "convolve", "norm_gated", "plan_spans", "scan_delta", "scan_ssm", "single_rows", "spans_of"]
