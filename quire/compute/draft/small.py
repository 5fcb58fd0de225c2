"""The draft model of a worker: its weights, and its pages beside the large model's.

Owns what is refused: other token ids, too few positions. Does not own how it guesses (`model.py`).
"""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec

from quire.compute.draft.model import ModelDrafter
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Platform
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import GREEDY, Runner
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.sample.sampler import Sampler
from quire.config.arch import ModelArch
from quire.config.kv import KVLayout
from quire.config.resolve import EngineLimits
from quire.core.errors import ConfigError
from quire.core.plan import SlotOpen


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """Where a draft model is."""

    folder: pathlib.Path
    arch: ModelArch

    def check(self, arch: ModelArch, layout: KVLayout, max_model_len: int) -> None:
        """ConfigError unless it can guess for a model of `arch` with these groups of layers."""
        if self.arch.vocab_size != arch.vocab_size:
            raise ConfigError(
                f"the draft model {self.folder} has {self.arch.vocab_size} token ids and the model has "
                f"{arch.vocab_size}: give one that was trained with the same tokenizer",
                param="speculative_config",
            )
        if self.arch.max_position_scaled < max_model_len:
            raise ConfigError(
                f"the draft model {self.folder} has {self.arch.max_position_scaled} positions, fewer than "
                f"max_model_len = {max_model_len}: add --max-model-len {self.arch.max_position_scaled}",
                param="speculative_config",
            )
        if not layout.n_full:
            raise ConfigError(
                "a draft model reads all of a sequence, and this model keeps no page of it behind its windows: add "
                "--disable-hybrid-kv-cache-manager, or give the method ngram",
                param="speculative_config",
            )


class SmallModel:
    """Its pages are numbered as the large model's, whose tables it uses."""

    def __init__(self, model: Decoder, platform: Platform, limits: EngineLimits) -> None:
        self.model, self._platform, self._limits = model, platform, limits

    def drafter(self, tables: SlotTables, pool: KVPool, vocab_limit: int | None) -> ModelDrafter:
        """With pages of its own, as many as `pool` has, of the same type."""
        device, limits, arch = self._platform.device, self._limits, self.model.arch
        own = KVPool(arch, pool.k.shape[1], tables.page_size, pool.k.dtype, device)
        sampler = Sampler(limits.max_num_seqs, arch.vocab_size, device.torch_device, vocab_limit=vocab_limit)
        tail = Tail(device, self.model, tables, sampler)
        for slot in range(limits.max_num_seqs):
            tail.open(SlotOpen(slot, [0], 1, GREEDY))
        alone = msgspec.structs.replace(limits, max_drafts=0)
        forwards = self._platform.forwards(self.model, own, tables, tail, alone)
        return ModelDrafter(Runner(own, tables, tail, forwards.in_turn), limits.max_num_batched_tokens)
