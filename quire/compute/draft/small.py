"""The draft model of a worker: its weights, and its pages beside the large model's.

Owns what is refused: other token ids, too few positions. Does not own how it guesses (`model.py`).
"""

from __future__ import annotations

import dataclasses
import pathlib

import msgspec
import torch

from quire.compute.dist.comm import Comm
from quire.compute.draft.loaded import LoadDecoder, check_share
from quire.compute.draft.model import ModelDrafter
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Platform
from quire.compute.runner.pool import KVPool
from quire.compute.runner.runner import Runner
from quire.compute.runner.tables import SlotTables
from quire.compute.runner.tail import Tail
from quire.compute.runner.warm_up import GREEDY
from quire.compute.sample.sampler import Sampler
from quire.compute.weights.footprint import Weights
from quire.config.arch import ModelArch
from quire.config.kv import KVLayout
from quire.config.resolve import EngineLimits
from quire.config.shares import share_arch
from quire.core.errors import ConfigError
from quire.core.plan import SlotOpen
from quire.planner.captured import decode_sizes
from quire.planner.shape import kv_numbers_per_token


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """`DraftSource`: where a draft model is."""

    folder: pathlib.Path
    arch: ModelArch
    n_ranks: int = 1
    """That share each layer."""

    def check(self, arch: ModelArch, layout: KVLayout, max_model_len: int) -> None:
        """See `DraftSource`."""
        if self.arch.state_specs:
            raise ConfigError(
                f"the draft model {self.folder} has recurrent layers, whose states a wrong draft would alter: "
                "give one without, or the method ngram",
                param="speculative_config",
            )
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
        check_share(f"the draft model {self.folder}", self.arch, self.n_ranks)
        if not layout.n_full:
            raise ConfigError(
                "a draft model reads all of a sequence, and this model keeps no page of it behind its windows: add "
                "--disable-hybrid-kv-cache-manager, or give the method ngram",
                param="speculative_config",
            )

    def numbers(self, itemsize: float, kv_itemsize: float) -> int:
        """See `DraftSource`: keys and values of the same type."""
        return kv_numbers_per_token(share_arch(self.arch, 0, self.n_ranks))

    def weights_bytes(self, weights: Weights, dtype: torch.dtype, quantization: str) -> int:
        """See `DraftSource`."""
        return weights.beside(self.folder, self.arch).footprint(dtype, quantization).held_bytes

    def captured(self, limits: EngineLimits) -> tuple[int, ...]:
        """See `DraftSource`."""
        return tuple(decode_sizes(limits.max_num_seqs))

    def load(self, load_decoder: LoadDecoder, model: Decoder, platform: Platform, comm: Comm) -> SmallModel:
        """See `DraftSource`."""
        return SmallModel(load_decoder(self.folder, self.arch), platform)


class SmallModel:
    """`LoadedDraft`. Its pages are numbered as the large model's, whose tables it uses."""

    def __init__(self, model: Decoder, platform: Platform) -> None:
        self.model, self._platform = model, platform

    @property
    def n_bytes(self) -> int:
        """See `LoadedDraft`."""
        return self.model.n_bytes

    def leave_device(self) -> None:
        """See `LoadedDraft`."""
        self.model.leave_device()

    def enter_device(self) -> None:
        """See `LoadedDraft`."""
        self.model.enter_device()

    def attach(self, pool: KVPool, max_rows: int) -> None:
        """Nothing of the large model's is read."""

    def drafter(self, tables: SlotTables, pool: KVPool, limits: EngineLimits, vocab_limit: int | None) -> ModelDrafter:
        """See `LoadedDraft`: pages of the same type."""
        device, arch = self._platform.device, self.model.arch
        if arch.keeps_lines and pool.k.dtype.itemsize == 1:
            raise ConfigError(
                f"kv_cache_dtype = {limits.kv_dtype!r} rounds keys and values of heads, and the draft model keeps one "
                "line a token for all heads: leave --kv-cache-dtype out, or give another draft model",
                param="kv_cache_dtype",
            )
        own = KVPool(arch, pool.k.shape[1], tables.page_size, pool.k.dtype, device)
        own.scales = self.model.kv_scales
        sampler = Sampler(limits.max_num_seqs, arch.vocab_size, device.torch_device, vocab_limit=vocab_limit)
        tail = Tail(device, self.model, tables, sampler)
        for slot in range(limits.max_num_seqs):
            tail.open(SlotOpen(slot, [0], 1, GREEDY))
        alone = msgspec.structs.replace(limits, max_drafts=0)
        forwards = self._platform.forwards(self.model, own, tables, tail, alone)
        runner = Runner(own, tables, tail, forwards.in_turn, alone=self._platform.rows_alone)
        return ModelDrafter(runner, limits.max_num_batched_tokens, forwards.ahead)
