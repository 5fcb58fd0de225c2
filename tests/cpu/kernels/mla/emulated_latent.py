"""The kernels of latent attention for Hopper, emulated on the host: attention to lines, and what is around it."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from types import SimpleNamespace

import pytest
import torch
from emulation import emulated_library, emulated_sources, share_memory

from quire.kernels.attention.hopper import latent
from quire.kernels.mla import hopper

SHARED = {
    "latent/shape.h": ("extern __shared__ char raw[];", "raw"),
    "latent/wide_shape.h": ("extern __shared__ char raw[];", "raw"),
    "latent/values.h": ("extern __shared__ __align__(16) char shared[];", "shared"),
    "latent_rows.cu": ("extern __shared__ __align__(16) char shared[];", "shared"),
}
"""Source: its declaration of shared memory, and the name there."""


CLUSTERS = """#pragma once
namespace quire {
inline emulated::Barrier& cluster_barrier() {
    static emulated::Barrier both(blockDim.x * 2), alone(blockDim.x);
    return emulated::warps.size() * 32 > blockDim.x ? both : alone;
}
inline void cluster_arrive() {}
inline void cluster_wait() { cluster_barrier().arrive_and_wait(); }
using emulated::address_in;
inline void arrive_there_plainly(uint32_t barrier) { barrier_arrive(barrier); }
inline void prefetch_bytes(const void*, uint32_t) {}
inline void load_box_for_all(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t hint, uint16_t ctas,
                             int c0, int c1, int c2, int c3, int c4) {
    const int own = emulated::cta;
    for (emulated::cta = 0; emulated::cta < emulated::MOST_CTAS; ++emulated::cta)
        if (ctas >> emulated::cta & 1) load_box(to, map, barrier, hint, c0, c1, c2, c3, c4);
    emulated::cta = own;
}
}  // namespace quire
"""
"""A cluster.h for clusters of one and of two blocks."""


def emulate(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of the kernels are those of an emulation, compiled in an empty folder."""
    sources = emulated_sources(folder)
    for name, declared in SHARED.items():
        share_memory(sources / name, *declared)
    (sources / "cluster.h").write_text(CLUSTERS)

    @functools.cache
    def lines(dtype: torch.dtype, rows: int) -> ctypes.CDLL:
        included = [flag for name in ("wgmma.h", "plain_variant.h") for flag in ("-include", str(sources / name))]
        options = [*hopper.definitions(dtype), f"-DQUIRE_ROWS={rows}", "-DEMULATED_CLUSTERS", *included]
        return emulated_library(sources / latent.source_of(rows), f"lines {dtype} {rows}", *options)

    @functools.cache
    def around(dtype: torch.dtype) -> ctypes.CDLL:
        options = [*hopper.definitions(dtype), "-include", str(sources / "gemm.h")]
        return emulated_library(sources / "latent_rows.cu", f"around {dtype}", *options)

    monkeypatch.setattr(latent, "_library", lines)
    monkeypatch.setattr(hopper, "library", around)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
