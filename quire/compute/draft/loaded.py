"""Drafters that have weights, as a worker holds them: from a checkpoint, through sleep, to a `Drafter` on its pages."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Protocol

import torch

from quire.compute.dist.comm import Comm
from quire.compute.draft.drafter import Drafter
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Platform
from quire.compute.runner.pool import KVPool
from quire.compute.runner.tables import SlotTables
from quire.compute.weights.footprint import Weights
from quire.config.arch import ModelArch
from quire.config.kv import KVLayout
from quire.config.resolve import EngineLimits
from quire.config.shares import share_arch
from quire.core.errors import ConfigError

LoadDecoder = Callable[[pathlib.Path, ModelArch], Decoder]


class LoadedDraft(Protocol):
    """Weights that guess."""

    @property
    def n_bytes(self) -> int:
        """Memory of this rank's weights."""
        ...

    def leave_device(self) -> None:
        """Into the host's memory, as `Decoder`."""
        ...

    def enter_device(self) -> None:
        """Back."""
        ...

    def attach(self, pool: KVPool, max_rows: int) -> None:
        """Before there is a forward strategy of the model: add what is to be read to its pages. max_rows: of a step."""
        ...

    def drafter(self, tables: SlotTables, pool: KVPool, limits: EngineLimits, vocab_limit: int | None) -> Drafter:
        """With pages of its own, as many as `pool` has. limits: of the engine; vocab_limit: token ids that exist."""
        ...


class DraftSource(Protocol):
    """Where such weights are."""

    def check(self, arch: ModelArch, layout: KVLayout, max_model_len: int) -> None:
        """ConfigError unless it can guess for a model of `arch` with these groups of layers, divided among its ranks as
        that is."""
        ...

    def numbers(self, itemsize: float, kv_itemsize: float) -> int:
        """What it keeps of a token on a rank, in numbers of the KV cache. itemsize, kv_itemsize: bytes a number there,
        and of the model's dtype."""
        ...

    def weights_bytes(self, weights: Weights, dtype: torch.dtype, quantization: str) -> int:
        """Of what a rank is to load, by headers and shapes, and no more than that. weights: of the model; the others as
        `Weights.footprint`. Raises LoadError or ConfigError, as loading it would."""
        ...

    def captured(self, limits: EngineLimits) -> tuple[int, ...]:
        """Sequences of each of its own steps that are captured, where steps are."""
        ...

    def load(self, load_decoder: LoadDecoder, model: Decoder, platform: Platform, comm: Comm) -> LoadedDraft:
        """model: that it guesses for; comm: of the ranks that share each layer of both, as load_decoder has it. Raises
        LoadError."""
        ...


def check_share(what: str, arch: ModelArch, n_ranks: int) -> None:
    """ConfigError where so many ranks cannot divide the layers of what guesses, of `arch`."""
    try:
        share_arch(arch, 0, n_ranks)
    except ConfigError as error:
        raise ConfigError(
            f"tensor_parallel_size = {n_ranks}: {what} is divided as the model is: {error.message}; or give the method "
            "ngram",
            param="speculative_config",
        ) from None
