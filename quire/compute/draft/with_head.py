"""The head of a worker: its weights, the features that it reads, and its pages beside the model's.

Owns what is refused. Does not own how it guesses (`eagle.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib

from quire.compute.draft.eagle import EagleDrafter
from quire.compute.draft.head import Head, load_head
from quire.compute.draft.head_steps import EagerSteps, HeadSteps, NativeSteps, obstacle
from quire.compute.draft.loaded import LoadDecoder
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Platform
from quire.compute.runner.features import Features
from quire.compute.runner.pool import KVPool
from quire.compute.runner.tables import SlotTables
from quire.config.arch import ModelArch
from quire.config.heads import HeadArch
from quire.config.kv import KVLayout
from quire.config.resolve import EngineLimits
from quire.config.token_tree import TreeShape
from quire.core.errors import ConfigError
from quire.planner.shape import kv_numbers_per_token

logger = logging.getLogger("quire.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """`DraftSource`: where a head is."""

    folder: pathlib.Path
    arch: HeadArch
    tree: TreeShape | None = None
    """How its guesses branch; None: they are chains."""

    def check(self, arch: ModelArch, layout: KVLayout, max_model_len: int) -> None:
        """See `DraftSource`."""
        self.arch.check(self.folder, arch)
        if not layout.n_full:
            raise ConfigError(
                "a head reads all of a sequence, and this model keeps no page of it behind its windows: add "
                "--disable-hybrid-kv-cache-manager, or give the method ngram",
                param="speculative_config",
            )
        if self.arch.arch.max_position < max_model_len:
            logger.warning(
                "the %s %s was trained on %d positions: behind them it guesses worse, and drafts stop where they do "
                "not pay",
                self.arch.layout.what, self.folder, self.arch.arch.max_position,
            )  # fmt: skip

    def numbers(self, itemsize: float, kv_itemsize: float) -> int:
        """See `DraftSource`: a layer's keys and values, and a feature in the model's dtype."""
        own = self.arch.arch
        return kv_numbers_per_token(own) + math.ceil(own.hidden_size * itemsize / kv_itemsize)

    def load(self, load_decoder: LoadDecoder, model: Decoder, platform: Platform) -> HeadModel:
        """See `DraftSource`."""
        head = load_head(self.folder, self.arch, model, platform.device.torch_device)
        return HeadModel(head, self.arch.taps_of(model.arch.n_layers), platform, self.tree)


class HeadModel:
    """`LoadedDraft`."""

    def __init__(self, head: Head, taps: tuple[int, ...], platform: Platform, tree: TreeShape | None) -> None:
        self.head, self._taps, self._platform, self._tree = head, taps, platform, tree

    @property
    def n_bytes(self) -> int:
        """See `LoadedDraft`."""
        return self.head.n_bytes

    def leave_device(self) -> None:
        """Nothing to do: heads work on the CPU alone (`config.resolve`)."""

    def enter_device(self) -> None:
        """Nothing to do."""

    def attach(self, pool: KVPool) -> None:
        """See `LoadedDraft`: the model leaves features."""
        n_pages, page_size = pool.k.shape[1], pool.k.shape[3]
        pool.features = Features(
            self._taps, self.head.joins, self.head.arch.arch.hidden_size, n_pages, page_size, self.head.dtype,
            self._platform.device,
        )  # fmt: skip

    def drafter(self, tables: SlotTables, pool: KVPool, limits: EngineLimits, vocab_limit: int | None) -> EagleDrafter:
        """See `LoadedDraft`. Keys and values are of the type of the model's."""
        assert pool.features is not None, "attach comes first"
        device, head, max_rows = self._platform.device, self.head, limits.max_num_batched_tokens
        own = KVPool(head.arch.arch, pool.k.shape[1], tables.page_size, pool.k.dtype, device)
        head.reach(limits.max_model_len)
        reason = obstacle(head)
        steps: HeadSteps
        if reason is None:
            steps = NativeSteps(device, head, own, tables, max_rows, limits.max_sampled)
        else:
            logger.warning("steps of the head run operation by operation: %s", reason)
            steps = EagerSteps(device, head, own, tables, max_rows)
        return EagleDrafter(head, steps, pool.features, tables, max_rows, self._tree)
