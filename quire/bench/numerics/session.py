"""One run of `quire doctor numerics`: options and a model in, blocks of rows out, in the order of the table.

Owns the order and what is chosen. Does not own loading (`Load`) nor words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quire.bench.numerics import attention, model
from quire.bench.numerics.deviation import BASELINE, OURS, Row
from quire.bench.options import NumericsOptions
from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.core.errors import ConfigError
from quire.core.units import format_bytes
from quire.kernels.attention.schedule.plan import Heads

ITEM_BYTES = 8


def check_memory(arch: ModelArch, free_bytes: int) -> None:
    """ConfigError when the float64 model cannot be in memory. free_bytes: 0 if unknown."""
    needed = ITEM_BYTES * arch.n_parameters
    if 0 < free_bytes < needed:
        raise ConfigError(
            f"the baseline is the model in float64: {format_bytes(needed)} for its {arch.n_parameters:,} parameters, "
            f"{format_bytes(free_bytes)} are free; take a smaller model of the same family"
        )


def check_attention(arch: ModelArch) -> None:
    """ConfigError where a layer has no keys and values of heads."""
    if any(not isinstance(layer.mixer, AttentionSpec) for layer in arch.layers):
        raise ConfigError(
            f"what is compared is attention with keys and values of heads, and layers of {arch.family} have another "
            "mixer: take a model of another family"
        )


def measure(
    options: NumericsOptions,
    arch: ModelArch,
    load: model.Load,
    ids: torch.Tensor,
    device: torch.device,
    skipped: dict[str, str],
) -> Iterator[list[Row]]:
    """A list for each block: attention on random inputs and on those of the first and last layer, then the model.

    ids: int64 [n] on the CPU, the prompt; longer sequences are for random inputs alone. `skipped`: what did not run,
    and why.
    """
    lengths = sorted(set(options.lengths))
    heads = Heads(arch.n_heads, arch.n_kv_heads, arch.head_dim)
    listed = attention.paths(device)
    for dtype in options.dtype:
        samples = [attention.random_sample(heads, n, options.seed) for n in lengths]
        yield [row for one in samples for row in _attention(one, dtype, listed, device, skipped)]
    skipped |= {f"the model, {n:,} tokens": "more than its context" for n in lengths if n > len(ids)}
    lengths = [n for n in lengths if n <= len(ids)]
    if not lengths:
        return
    with torch.inference_mode():
        exact = model.run_exact(load, arch, ids, lengths, sorted({0, arch.n_layers - 1}))
    for sample in exact.samples.values():
        for dtype in options.dtype:
            yield [row for n in lengths for row in _attention(sample.first(n), dtype, listed, device, skipped)]
    alone = {BASELINE: listed[0], OURS: attention.kernel_path(device)}
    for i, dtype in enumerate(options.dtype):
        roundings = model.ROUNDINGS if i == 0 and device.type == "cpu" else ()
        with torch.inference_mode():
            found = list(model.rows(exact, load, ids, dtype, device, alone, skipped, roundings))
        yield found


def _attention(
    sample: attention.Sample,
    dtype: str,
    listed: Sequence[attention.Path],
    device: torch.device,
    skipped: dict[str, str],
) -> list[Row]:
    with torch.inference_mode():
        return list(attention.rows(sample, dtype, listed, device, skipped))
