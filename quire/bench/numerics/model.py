"""The logits of a whole model against the same model in float64: its own types, rounded weights and keys, chunks.

The baseline is the decoder itself with float64 parameters on the torch references, on the CPU; rotary tables are
float32 for everybody. Beside it stands float64 with nothing but attention in the type, which says how much of a
deviation is attention's (Golden et al. 2024 compare with low-precision training in this way).
Owns the pages of one sequence and what is run. Does not own loading: the caller gives `Load`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from quire.bench.numerics.attention import LOW_KEYS, PAGE, NotTaken, Path, Sample, type_word
from quire.bench.numerics.deviation import BASELINE, DTYPES, OURS, ROUNDED, Row, deviation
from quire.config.arch import ModelArch
from quire.kernels import attention
from quire.kernels.attention import reference
from quire.kernels.attention.variant import Variant
from quire.kernels.e4m3 import E4M3
from quire.kernels.hopper import converts_to_e4m3
from quire.kernels.kvstore import entry
from quire.kernels.qkv import rotate_and_store

CHUNK: Final = 64
"""Tokens of a chunk of a prompt."""
MAX_VALUES: Final = 1 << 24
"""Logits of one prompt that are compared; of a longer one rows at even distances."""
ROUNDINGS: Final = ("int8", "int4")
"""Values of --quantization that are measured, on a CPU."""

Attend = Callable[[int, Sample], torch.Tensor]
"""(layer, its queries, keys and values in float64) → outputs [n, n_heads, head_dim], float64."""


class Model(Protocol):
    """A decoder; see quire.compute.models.decoder."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: Any, wanted: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


Load = Callable[[torch.dtype, torch.device, str], Model]
"""(type, device, value of --quantization) → the model."""


class Pages:
    """One sequence's keys and values in pages: what grouped-query attention asks of the `Context` of compute/layers."""

    def __init__(
        self, arch: ModelArch, dtype: torch.dtype, n_tokens: int, device: torch.device, attend: Attend | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """attend: in place of the library's attention, for a prompt in one go."""
        self._arch, self._device, self._attend = arch, device, attend
        n_pages, kv_dtype = -(-n_tokens // PAGE), kv_dtype or dtype
        self._table = torch.arange(n_pages, dtype=torch.int32, device=device)[None]
        shape = (arch.n_layers, n_pages, arch.n_kv_heads, PAGE, entry.entry_size(arch.head_dim, kv_dtype))
        self._k, self._v = torch.zeros(2, *shape, dtype=kv_dtype, device=device)

    def begin(self, start: int, n: int) -> torch.Tensor:
        """Plan the next n tokens; returns their positions."""
        arch = self._arch
        self._plan = attention.plan(
            np.array([0, n]), np.array([start + n]), np.array([0]), self._table, page_size=PAGE, n_q_heads=arch.n_heads,
            n_kv_heads=arch.n_kv_heads, head_dim=arch.head_dim,
        )  # fmt: skip
        self._at = torch.arange(start, start + n, device=self._device)
        return self._at

    def store(
        self, layer: int, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
        positions: torch.Tensor, cos_sin: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `Context.store`; page i of the sequence is page i."""
        return rotate_and_store(
            qkv, q_norm, k_norm, eps, positions, cos_sin, self._k[layer], self._v[layer], self._at
        )  # fmt: skip

    def attend(self, layer: int, q: torch.Tensor, variant: Variant) -> torch.Tensor:
        """See `Context.attend`."""
        if self._attend is not None:
            k, v = (x[layer].transpose(1, 2).flatten(0, 1)[: len(q)] for x in (self._k, self._v))
            return self._attend(layer, Sample(f"layer {layer}", q, k, v, variant))
        if q.dtype == torch.float64:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            reference.run(q, self._k[layer], self._v[layer], self._plan, variant, out, None)
            return out
        return attention.run(q, self._k[layer], self._v[layer], self._plan, variant)


def logits_of(model: Model, pages: Pages, ids: torch.Tensor, kept: torch.Tensor, chunk: int, width: int) -> (
    torch.Tensor
):  # fmt: skip
    """Logits [len(kept), width] of a prompt computed in chunks, at the ascending positions `kept`. ids, kept: int64, on
    the model's device."""
    found = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        positions = pages.begin(start, len(part))
        inside = kept[(kept >= start) & (kept < start + len(part))] - start
        wanted = inside if len(inside) else torch.zeros_like(kept[:1])
        hidden = model.forward(part, positions, pages, wanted)
        if len(inside):
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            found.append(model.logits(hidden, torch.empty(len(hidden), width, dtype=wide, device=hidden.device)))
    return torch.cat(found)


@dataclasses.dataclass(slots=True)
class Exact:
    """The float64 model and its logits for each length."""

    model: Model
    arch: ModelArch
    logits: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Length of the prompt → float64 [rows kept, vocab_size]."""
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)
    """Layer → what its attention was given for the longest prompt, without the variant's hooks."""


def kept_rows(n: int, width: int) -> torch.Tensor:
    """int64: the positions of n whose logits are compared; the last is one of them."""
    most = max(1, MAX_VALUES // width)
    return torch.arange(n) if n <= most else torch.linspace(0, n - 1, most).long()


def run_exact(load: Load, arch: ModelArch, ids: torch.Tensor, lengths: Sequence[int], layers: Sequence[int]) -> Exact:
    """Compute the baseline for the first tokens of `ids`, and keep what attention of `layers` is given."""
    cpu = torch.device("cpu")
    exact = Exact(load(torch.float64, cpu, "none"), arch)
    for n in lengths:

        def watched(layer: int, sample: Sample, n: int = n) -> torch.Tensor:
            if layer in layers and n == max(lengths):
                plain = Variant(sample.variant.scale, window=sample.variant.window)
                exact.samples[layer] = dataclasses.replace(sample, q=sample.q.clone(), variant=plain)
            return _of_reference(sample)

        pages = Pages(arch, torch.float64, n, cpu, watched)
        exact.logits[n] = logits_of(exact.model, pages, ids[:n], kept_rows(n, arch.vocab_size), n, arch.vocab_size)
    return exact


def _of_reference(sample: Sample) -> torch.Tensor:
    """Attention of a whole sequence in its own type, any variant."""
    n, n_heads, head_dim = sample.q.shape
    bounds = np.array([0, n])
    plan = attention.plan_ragged(
        bounds, bounds, n_q_heads=n_heads, n_kv_heads=sample.k.shape[1], head_dim=head_dim, device=sample.q.device
    )
    out = torch.empty_like(sample.q, memory_format=torch.contiguous_format)
    reference.run(sample.q, sample.k, sample.v, plan, sample.variant, out, None)
    return out


def rows(
    exact: Exact, load: Load, ids: torch.Tensor, dtype_name: str, device: torch.device,
    alone: Mapping[str, Path], skipped: dict[str, str], roundings: Sequence[str] = (),
) -> Iterator[Row]:  # fmt: skip
    """One type: the whole model, in chunks, with keys of 8 bits, with weights of `roundings`; and attention alone.

    alone: kind → the path that computes attention in the type while all else is float64.
    """
    dtype, arch = DTYPES[dtype_name], exact.arch

    def row(path: str, kind: str, tile: str, n: int, pages: Pages, model: Model, chunk: int) -> Row:
        place = torch.device("cpu") if model is exact.model else device
        kept = kept_rows(n, arch.vocab_size).to(place)
        got = logits_of(model, pages, ids[:n].to(place), kept, chunk, arch.vocab_size)
        found = deviation(got, exact.logits[n], logits=True)
        return Row("model", "prompt", dtype_name, path, kind, tile, n, found)

    for kind, path in alone.items():
        for n in exact.logits:
            pages = Pages(arch, torch.float64, n, torch.device("cpu"), _in_type(path, dtype, device))
            try:
                yield row(f"attention alone: {path.name}", kind, "whole", n, pages, exact.model, n)
            except NotTaken as reason:
                skipped[f"attention alone: {path.name}, {dtype_name}"] = str(reason)
    for rounding in ("none", *roundings):
        model = load(dtype, device, rounding)
        name = "all" if rounding == "none" else f"all, {rounding} weights"
        for n in exact.logits:
            kind = OURS if rounding == "none" else ROUNDED
            yield row(name, kind, "whole", n, Pages(arch, dtype, n, device), model, n)
            if rounding == "none" and n > CHUNK:
                yield row(name, OURS, f"{CHUNK} tokens", n, Pages(arch, dtype, n, device), model, CHUNK)
            for low in LOW_KEYS[device.type] if rounding == "none" else ():
                if low == E4M3 and not converts_to_e4m3(device):
                    continue
                pages = Pages(arch, dtype, n, device, kv_dtype=low)
                yield row(f"{name}, {type_word(low)} keys", ROUNDED, "whole", n, pages, model, n)


def _in_type(path: Path, dtype: torch.dtype, device: torch.device) -> Attend:
    """Attention by a path in a type, between float64 before and behind. NotTaken for hooks that the baseline lacks."""

    def attend(layer: int, sample: Sample) -> torch.Tensor:
        variant = sample.variant
        if (path.kind == BASELINE and variant.program.hooks) or (variant.tensors and device.type != "cpu"):
            raise NotTaken("the model's attention has a transform, which this path does not have")
        return path.run(sample.rounded(dtype, device)).to(sample.q.device, torch.float64).contiguous()

    return attend
