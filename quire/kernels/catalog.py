"""The catalogue: every op, its implementations in order of preference, and when one of them cannot run.

Data only: selector.py takes from it what runs, and `quire kernels` and the kernel benchmark show the same entries.
Invariants: each folder of kernels with an op.py is here; the best of a device comes first, the reference last. A module
that takes only some inputs says why not: `obstacle(*arguments)` returns a sentence or None (a `Slower` one: another is
as fast), `static_obstacle` the same for any machine, without a build. Where finding out makes what the run needs, it is
`prepare(*arguments)`, which returns a sentence, or the function ready for these arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch

from quire.kernels import hopper, jit, native
from quire.kernels.invariance import are_rows_alone

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
    return cuda_obstacle() or hopper.machine_obstacle()


class Slower(str):
    """A reason that loses nothing: for such inputs another implementation is as fast or faster. No warning is due."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Implementation:
    """One module that computes functions of one op."""

    op: str
    name: str
    functions: tuple[str, ...]
    """Those of the op that the module has."""
    devices: tuple[str, ...]
    """Types of the devices whose tensors it takes."""
    needs: str
    """One line for people."""
    machine_obstacle: Obstacle = _nothing
    """Why it cannot run on this machine, whatever the inputs; None if it can."""
    dtypes: tuple[torch.dtype, ...] = ()
    """Types of the first argument that it takes; none named: it says so itself, or takes all."""
    missed: bool = False
    """Whether it is worth a warning when another one runs because this one cannot."""
    place: str = ""
    """Module, inside the folder of the op; '': as the name."""

    @property
    def module(self) -> str:
        """Name of the module."""
        return f"quire.kernels.{self.op}.{self.place or self.name}"

    def load(self) -> ModuleType:
        """The module, imported. Raises ImportError when a package that it is made with is not installed."""
        return importlib.import_module(self.module)

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Why it never runs on this machine on a first argument of this type, or None."""
        if self.dtypes and dtype not in self.dtypes:
            return f"it takes {', '.join(str(one).removeprefix('torch.') for one in self.dtypes)}, not {dtype}"
        return self.machine_obstacle()

    def obstacle(self, dtype: torch.dtype, *arguments: object) -> str | None:
        """Why it cannot run these arguments here, or None. Builds what it needs (seconds).

        dtype: type of the first tensor; arguments: what the op's conditions take.
        """
        found = self.refusal(dtype)
        condition = None if found else condition_of(self.load())
        answer = condition(*arguments) if condition else found
        return answer if isinstance(answer, str) else None

    def static_obstacle(self, *arguments: object) -> str | None:
        """Why no machine could run these arguments with it, or None. Builds nothing and needs no device."""
        try:
            module = self.load()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        condition = getattr(module, "static_obstacle", None) or getattr(module, "obstacle", None)
        answer: str | None = condition(*arguments) if condition else None
        return answer


def unless_alone() -> str | None:
    """Why what is made for rows that are alone does not run, or None: it is slower than what does elsewhere."""
    return None if are_rows_alone() else Slower("rows are not to be alone")


def condition_of(module: ModuleType) -> Callable[..., object] | None:
    """What a module is asked before it runs: a str says why not, None that it can, anything else runs in its place."""
    return getattr(module, "prepare", None) or getattr(module, "obstacle", None)


OPS = {
    "attention": "attention over pages or rows of keys: prefill, append, decode, variants",
    "flash": "dense attention with gradients",
    "gemm": "linear layer, with the norm before it and the activation or the residual after it",
    "qgemm": "linear layer with packed weights: floating, or of 8 or 4 bits",
    "w8a8": "linear layer with weights and activations of 8 bits: e4m3, integers",
    "w4a16": "linear layer with weights of 4 bits in groups",
    "mxfp4": "linear layer with weights in MXFP4",
    "lora": "adapters of many requests: two small products of each row's own, added to a product",
    "norm": "RMS norm, with and without a residual, and LayerNorm",
    "qkv": "qk-norm, rotary embedding, and keys and values into pages",
    "mla": "latent attention: lines into pages, what queries ask of them, values of what is seen",
    "act": "activations of the feed-forward, gated and plain",
    "moe": "mixtures of experts: the choice of experts, and their products",
    "kvstore": "copies pages",
    "state": "recurrent mixers: short convolution, scan of Mamba-2, gated delta rule",
    "sample": "one token from each row of logits",
}
"""Op → what it does."""


_TRITON = "a CUDA device, Triton"
_NATIVE = "the compiled CPU kernels"
_HOPPER = "a Hopper GPU and nvcc; builds kernels at run time"
_TORCH = "torch; slow, the oracle of the others"
_BOTH = ("cuda", "cpu")
_FLOATS = tuple(native.DTYPES)


def _hopper(op: str, *functions: str, more: str = "", missed: bool = True, place: str = "") -> Implementation:
    needs = _HOPPER + more
    return Implementation(op, "hopper", functions, ("cuda",), needs, hopper_obstacle, missed=missed, place=place)


def _triton(op: str, *functions: str, place: str = "") -> Implementation:
    return Implementation(op, "triton", functions, ("cuda",), _TRITON, triton_obstacle, place=place)


def _native(op: str, *functions: str) -> Implementation:
    return Implementation(op, "cpu", functions, ("cpu",), _NATIVE, native_obstacle, _FLOATS)


def _alone(op: str, name: str, *functions: str, place: str = "", on_gpu: bool = False) -> Implementation:
    kind, needs, obstacle = ("cuda", _TRITON, triton_obstacle) if on_gpu else ("cpu", _NATIVE, native_obstacle)
    needs += "; for rows that are to be alone (`kernels/invariance`)"
    return Implementation(op, name, functions, (kind,), needs, obstacle, _FLOATS, place=place)


def _reference(op: str, *functions: str, devices: tuple[str, ...] = _BOTH) -> Implementation:
    return Implementation(op, "reference", functions, devices, _TORCH)


_NORMS = ("rms_norm", "add_rms_norm")
_SCANS = ("convolve", "scan_ssm", "scan_delta", "norm_gated")

CATALOGUE: tuple[Implementation, ...] = (
    _hopper("attention", "run", place="hopper.launcher"),
    Implementation(
        "attention", "hopper-e4m3", ("run",), ("cuda",), f"{_HOPPER}, and Triton", hopper_obstacle, place="coded"
    ),
    _triton("attention", "run", place="triton.launcher"),
    Implementation("attention", "hopper-latent", ("run",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper.latent"),
    Implementation("attention", "latent", ("run",), ("cuda",), _TRITON, triton_obstacle, place="triton.latent"),
    Implementation("attention", "cpu", ("run",), ("cpu",), _NATIVE, native_obstacle, missed=True, place="cpu.launcher"),
    _reference("attention", "run"),
    Implementation(
        "attention", "triton-states", ("merge",), ("cuda",), _TRITON, triton_obstacle, _FLOATS, place="triton.states"
    ),
    Implementation("attention", "composed", ("merge",), _BOTH, "torch; a pass for each of some ten steps"),
    _triton("flash", "forward", "backward"),
    Implementation("flash", "cpu", ("forward", "backward"), ("cpu",), "torch; in blocks, memory linear in the length"),
    _reference("flash", "flash_attention"),
    _hopper("gemm", "linear", more="; where it is estimated to be the fastest", missed=False),
    _alone("gemm", "triton-rows", "linear", place="rows", on_gpu=True),
    Implementation("gemm", "composed", ("linear",), _BOTH, "torch; F.linear between the norm and act ops, any size"),
    _reference("gemm", "linear"),
    _native("qgemm", "linear", "pack"),
    _reference("qgemm", "linear", "pack", devices=("cpu",)),
    _hopper("w8a8", "linear_fp8"),
    _triton("w8a8", "linear_fp8", "linear_int8"),
    _reference("w8a8", "linear_fp8", "linear_int8"),
    _hopper("w4a16", "linear"),
    _triton("w4a16", "linear"),
    _reference("w4a16", "linear"),
    _triton("mxfp4", "linear"),
    _reference("mxfp4", "linear"),
    _hopper("lora", "prepare", more="; adds in the product itself, up to 64 rows"),
    _triton("lora", "add"),
    _native("lora", "add_lines"),
    _reference("lora", "add", "add_lines"),
    _hopper("norm", *_NORMS, more="; up to 512 rows"),
    _triton("norm", *_NORMS, "layer_norm"),
    _native("norm", *_NORMS),
    Implementation("norm", "aten", ("layer_norm",), ("cpu",), "torch; its own LayerNorm"),
    _reference("norm", *_NORMS, "layer_norm"),
    _hopper("qkv", "rotate_and_store", more="; up to 512 rows"),
    _triton("qkv", "rotate_and_store"),
    _native("qkv", "rotate_and_store"),
    _reference("qkv", "rotate_and_store"),
    Implementation("mla", "hopper-ask", ("ask",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper_ask"),
    Implementation("mla", "hopper-attend", ("attend",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper_attend"),
    Implementation("mla", "hopper-values", ("values",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper_values"),
    _alone("mla", "triton-rows", "ask", "values", place="rows", on_gpu=True),
    _triton("mla", "store"),
    Implementation("mla", "cpu", ("store",), ("cpu",), "torch; the norm's kernel and one copy", dtypes=_FLOATS),
    _alone("mla", "cpu-heads", "ask", "values", place="cpu_heads"),
    Implementation(
        "mla", "composed", ("ask", "attend", "values"), _BOTH, "torch's products of each head, and other ops"
    ),
    _reference("mla", "store", "ask", "values"),
    _hopper("act", "silu_mul"),
    _triton("act", "silu_mul", "activate"),
    _native("act", "silu_mul"),
    _alone("act", "cpu-elements", "sigmoid", "activate", place="elements"),
    Implementation("act", "torch", ("sigmoid",), _BOTH, "torch; its own sigmoid", place="aten"),
    Implementation("act", "aten", ("activate",), ("cpu",), "torch; its own activations"),
    _reference("act", "silu_mul", "activate"),
    _hopper("moe", "experts", more="; SwiGLU as configured, hidden and inner sizes of whole 64s"),
    Implementation(
        "moe", "hopper-shared", ("experts_with_shared",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper_shared"
    ),
    Implementation("moe", "hopper-router", ("choose",), ("cuda",), _HOPPER, hopper_obstacle, place="hopper_router"),
    _triton("moe", "route", "experts", "adapted_experts"),
    _native("moe", "route", "packed_experts"),
    Implementation("moe", "composed", ("choose", "experts_with_shared"), _BOTH, "other ops in turn"),
    _reference("moe", "route", "choose", "experts", "experts_with_shared", "packed_experts", "adapted_experts"),
    _hopper("sample", "collect", more="; a part of triton's choice, where many logits may matter"),
    _triton("sample", "choose_by", "lines", "penalise", "widen"),
    Implementation(
        "sample",
        "cpu",
        ("choose_by", "lines", "penalise", "widen"),
        ("cpu",),
        "numpy, torch; the compiled kernels if there",
    ),
    _reference("sample", "choose_by", "lines", "penalise", "widen"),
    _alone("state", "triton-tokens", "scan_ssm", "scan_delta", place="triton.alone", on_gpu=True),
    _hopper("state", "scan_delta", more="; the delta rule of keys of 128"),
    _triton("state", *_SCANS, place="triton.launcher"),
    _native("state", *_SCANS),
    Implementation("state", "chunked", _SCANS, ("cpu",), "torch; pieces of prompts as products of matrices"),
    _reference("state", *_SCANS),
    _triton("kvstore", "copy_pages"),
    Implementation("kvstore", "cpu", ("copy_pages",), ("cpu",), "torch; one slice assignment a page"),
    _reference("kvstore", "copy_pages"),
)
"""All of them; those of an op stand together."""


def of(op: str, device_type: str = "") -> list[Implementation]:
    """Implementations of an op, best first, the reference last; of one type of device, or of all."""
    return [entry for entry in CATALOGUE if entry.op == op and (not device_type or device_type in entry.devices)]


def entry(op: str, name: str) -> Implementation:
    """The implementation of that name. Raises KeyError when there is none."""
    found = {one.name: one for one in of(op)}
    return found[name]


def selectable(op: str, function: str, device_type: str) -> list[Implementation]:
    """Those that may run a function, in order of preference. On CUDA nothing falls back to the reference."""
    listed = [entry for entry in of(op, device_type) if function in entry.functions]
    return [entry for entry in listed if entry.name != "reference" or device_type == "cpu"]


def runnable(op: str, device_type: str, function: str = "") -> list[Implementation]:
    """Implementations of an op that this machine can run on this type of device, best first, the reference last. With a
    function: those that have it."""
    listed = [entry for entry in of(op, device_type) if not function or function in entry.functions]
    return [entry for entry in listed if entry.machine_obstacle() is None]


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
