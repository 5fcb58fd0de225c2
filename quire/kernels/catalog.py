"""The catalogue: every op, its implementations, and why one of them cannot run on this machine.

Data only: what runs for given inputs is decided by backends.py and attention/select.py. Invariant: each folder of
kernels with an op.py is here, each entry is a module `quire.kernels.<op>.<name>`, the best of a device comes first.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch

from quire.kernels import jit, native

Obstacle = Callable[[], str | None]


def _nothing() -> str | None:
    return None


def native_obstacle() -> str | None:
    """Why the compiled CPU kernels cannot run here, or None."""
    return None if native.library() is not None else native.explain()


def cuda_obstacle() -> str | None:
    """Why there is no CUDA device here, or None."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type == "cuda":
        return None
    return "no CUDA device" + ("" if torch.version.cuda else ": this is a CPU build of torch")


def triton_obstacle() -> str | None:
    """Why Triton's kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return cuda_obstacle()


def hopper_obstacle() -> str | None:
    """Why the CUDA C++ kernels cannot run here, or None."""
    found = cuda_obstacle()
    if found is None:
        found = importlib.import_module("quire.kernels.attention.hopper.launcher").machine_obstacle()
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Implementation:
    """One module that computes one op."""

    op: str
    name: str
    devices: tuple[str, ...]
    """Types of the devices whose tensors it takes."""
    needs: str
    """One line for people."""
    find_obstacle: Obstacle = _nothing

    @property
    def module(self) -> str:
        """Name for `importlib.import_module`."""
        return f"quire.kernels.{self.op}.{self.name}"

    @property
    def obstacle(self) -> str | None:
        """Why it cannot run on this machine, whatever the inputs; None if it can."""
        return self.find_obstacle()


OPS = {
    "attention": "attention over pages or rows of keys: prefill, append, decode, variants",
    "flash": "dense attention with gradients",
    "gemm": "linear layer, with the norm before it and the activation or the residual after it",
    "qgemm": "linear layer with packed weights: floating, or of 8 or 4 bits",
    "norm": "RMS norm, with and without a residual",
    "qkv": "qk-norm, rotary embedding, and keys and values into pages",
    "act": "SwiGLU's activation",
    "kvstore": "copies pages",
    "sample": "one token from each row of logits",
}
"""Op → what it does."""


def _implementations(op: str) -> list[Implementation]:
    return [
        Implementation(op, "triton", ("cuda",), "a CUDA device, Triton", triton_obstacle),
        Implementation(op, "cpu", ("cpu",), "the compiled CPU kernels", native_obstacle),
        Implementation(op, "reference", ("cuda", "cpu"), "torch; slow, the oracle of the others"),
    ]


def _hopper(op: str) -> Implementation:
    return Implementation(op, "hopper", ("cuda",), "a Hopper GPU and nvcc; builds kernels at run time", hopper_obstacle)


CATALOGUE: tuple[Implementation, ...] = (
    _hopper("attention"),
    *_implementations("attention"),
    Implementation("flash", "triton", ("cuda",), "a CUDA device, Triton", triton_obstacle),
    Implementation("flash", "cpu", ("cpu",), "torch; in blocks, memory linear in the length"),
    Implementation("flash", "reference", ("cuda", "cpu"), "torch; slow, the oracle of the others"),
    Implementation(
        "gemm", "hopper", ("cuda",), "a Hopper GPU and nvcc; up to 64 rows; builds kernels at run time", hopper_obstacle
    ),
    Implementation("gemm", "composed", ("cuda", "cpu"), "torch; F.linear between the norm and act ops, any size"),
    Implementation("gemm", "reference", ("cuda", "cpu"), "torch; slow, the oracle of the others"),
    Implementation("qgemm", "cpu", ("cpu",), "the compiled CPU kernels", native_obstacle),
    Implementation("qgemm", "reference", ("cpu",), "torch; slow, the oracle of the others"),
    *(entry for op in ("norm", "qkv", "act") for entry in (_hopper(op), *_implementations(op))),
    *_implementations("sample"),
    Implementation("kvstore", "triton", ("cuda",), "a CUDA device, Triton", triton_obstacle),
    Implementation("kvstore", "cpu", ("cpu",), "torch; one slice assignment a page"),
    Implementation("kvstore", "reference", ("cuda", "cpu"), "torch; slow, the oracle of the others"),
)


def runnable(op: str, device_type: str) -> list[Implementation]:
    """Implementations of an op that this machine can run on this type of device, best first, the reference last."""
    return [entry for entry in CATALOGUE if entry.op == op and device_type in entry.devices and entry.obstacle is None]


@dataclasses.dataclass(frozen=True, slots=True)
class Toolchain:
    """What implementations are made with on this machine, in words."""

    native: str
    triton: str
    nvcc: str
    compiler: str
    cache: str


def toolchain() -> Toolchain:
    """Look at this machine; creates nothing."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return Toolchain(
        native=native.explain(),
        triton=triton,
        nvcc=jit.compiler("nvcc") or "not found",
        compiler=jit.compiler("c++") or "not found",
        cache=_cache(),
    )


def _cache() -> str:
    place, trouble = jit.asked_folder()
    if trouble:
        return f"{place} is not used ({trouble}): set QUIRE_CACHE_DIR, else each process builds its kernels again"
    entries = [path for path in place.glob("*.*") if path.suffix in (".so", ".py")]
    n_bytes = sum(path.stat().st_size for path in entries)
    return f"{place}, {len(entries)} kernels, {n_bytes / 2**20:.1f} MiB"
