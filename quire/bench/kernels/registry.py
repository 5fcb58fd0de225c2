"""Op → its cases and checks. Invariant: every op of the catalogue is here (tests/arch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.bench.kernels import (
    adapters,
    attention,
    attention_check,
    coded,
    experts,
    experts_check,
    flash,
    latent,
    linear,
    quantised,
    rows,
    sample,
    state,
)
from quire.bench.kernels.case import Case, Check, Setting

Cases = Callable[[str, Setting], Iterator[Case]]
Checks = Callable[[str, Setting], Iterator[Check]]

OPS: dict[str, tuple[Cases, Checks]] = {
    "attention": (attention.cases, attention_check.checks),
    "flash": (flash.cases, flash.checks),
    "gemm": (linear.cases, linear.checks),
    "qgemm": (quantised.cases, quantised.checks),
    "w8a8": (coded.cases, coded.checks),
    "w4a16": (coded.cases, coded.checks),
    "mxfp4": (coded.cases, coded.checks),
    "lora": (adapters.cases, adapters.checks),
    "norm": (rows.cases, rows.checks),
    "qkv": (rows.cases, rows.checks),
    "act": (rows.cases, rows.checks),
    "kvstore": (rows.cases, rows.checks),
    "mla": (latent.cases, latent.checks),
    "moe": (experts.cases, experts_check.checks),
    "sample": (sample.cases, sample.checks),
    "state": (state.cases, state.checks),
}
