"""The head of a worker: its weights, the features that it reads, and its pages beside the model's.

Owns what is refused. Does not own how it guesses (`eagle.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pathlib

import torch

from quire.compute.dist.comm import Comm
from quire.compute.draft.eagle import EagleDrafter
from quire.compute.draft.head import Head, head_bytes, load_head
from quire.compute.draft.head_graphs import HeadGraphs, chain_sizes
from quire.compute.draft.head_steps import EagerSteps, HeadSteps, KnownFeatures, NativeSteps, obstacle
from quire.compute.draft.head_tree import TreeGrowth
from quire.compute.draft.loaded import LoadDecoder, check_share
from quire.compute.models.decoder import Decoder
from quire.compute.platform import Platform
from quire.compute.runner.features import Features
from quire.compute.runner.pool import KVPool
from quire.compute.runner.tables import SlotTables
from quire.compute.weights.footprint import Weights
from quire.compute.weights.hub import called
from quire.config.arch import ModelArch
from quire.config.heads import HeadArch
from quire.config.kv import KVLayout
from quire.config.resolve import EngineLimits
from quire.config.shares import share_arch
from quire.config.token_tree import TreeShape
from quire.core.errors import ConfigError
from quire.core.ticker import ticking
from quire.kernels.attention import trees
from quire.kernels.attention.schedule.tiles import small_rows_of
from quire.kernels.invariance import RowsAlone, rows_alone
from quire.planner.shape import kv_numbers_per_token

logger = logging.getLogger("quire.engine")


@dataclasses.dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """`DraftSource`: where a head is."""

    folder: pathlib.Path
    arch: HeadArch
    tree: TreeShape | None = None
    """How its guesses branch; None: they are chains."""
    n_ranks: int = 1
    """That share each layer."""

    def check(self, arch: ModelArch, layout: KVLayout, max_model_len: int) -> None:
        """See `DraftSource`."""
        name = called(str(self.folder))
        self.arch.check(name, arch)
        check_share(f"the {self.arch.layout.what} {name}", self.arch.arch, self.n_ranks)
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
        own = share_arch(self.arch.arch, 0, self.n_ranks)
        return kv_numbers_per_token(own) + math.ceil(own.hidden_size * itemsize / kv_itemsize)

    def weights_bytes(self, weights: Weights, dtype: torch.dtype, quantization: str) -> int:
        """See `DraftSource`; without a table of its own."""
        model, scheme = weights.layers_of(dtype, quantization)
        return head_bytes(self.arch, model, scheme, weights.device, weights.comm)

    def captured(self, limits: EngineLimits) -> tuple[int, ...]:
        """See `DraftSource`."""
        return tuple(chain_sizes(limits.max_num_seqs, limits.max_drafts))

    def load(self, load_decoder: LoadDecoder, model: Decoder, platform: Platform, comm: Comm) -> HeadModel:
        """See `DraftSource`."""
        head = load_head(self.folder, self.arch, model, platform.device.torch_device, comm)
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
        """See `LoadedDraft`."""
        self.head.leave_device()

    def enter_device(self) -> None:
        """See `LoadedDraft`."""
        self.head.enter_device()

    def attach(self, pool: KVPool, max_rows: int) -> None:
        """See `LoadedDraft`: the model leaves features."""
        with ticking("building the head's kernels"):
            self.head.build_kernels(max_rows)
            self.head.build_joins(max_rows)
            if self._platform.rows_alone is not RowsAlone.NEVER:
                with rows_alone():
                    self.head.build_joins(max_rows)
        n_pages, page_size = pool.k.shape[1], pool.k.shape[3]
        pool.features = Features(
            self._taps, self.head.joins, self.head.arch.arch.hidden_size, n_pages, page_size, self.head.dtype,
            self._platform.device,
        )  # fmt: skip

    def drafter(self, tables: SlotTables, pool: KVPool, limits: EngineLimits, vocab_limit: int | None) -> EagleDrafter:
        """See `LoadedDraft`. Keys and values are of the type of the model's."""
        head, max_rows = self.head, limits.max_num_batched_tokens
        own = KVPool(head.part, pool.k.shape[1], tables.page_size, pool.k.dtype, self._platform.device)
        head.reach(limits.max_model_len)
        steps = self._steps(own, tables, pool, limits)
        queuing = steps if isinstance(steps, HeadGraphs) else None
        return EagleDrafter(steps, tables, max_rows, self._growth(steps), queuing)

    def _growth(self, steps: HeadSteps) -> TreeGrowth | None:
        if self._tree is None:
            return None
        variant = self.head.layer.mixer.variant
        reason = (
            "mixer is no attention" if variant is None else trees.obstacle(variant, self._platform.device.torch_device)
        )
        if reason:
            logger.warning("drafts are chains, not trees: the head's %s", reason.removeprefix("its "))
            return None
        return TreeGrowth(steps, self._tree, self.head.token_ids)

    def _steps(self, own: KVPool, tables: SlotTables, pool: KVPool, limits: EngineLimits) -> HeadSteps:
        """own: the head's pages."""
        assert pool.features is not None, "attach comes first"
        device, head, max_rows = self._platform.device, self.head, limits.max_num_batched_tokens
        known = KnownFeatures(pool.features, tables, head.model_norm)
        eager = EagerSteps(device, head, own, tables, known, max_rows)
        capturing = self._platform.capturing
        if capturing is not None and not any(own.windows) and own.group <= small_rows_of(own.group):
            graphs = HeadGraphs(
                capturing, head, own, tables, known, eager, limits.max_num_seqs, limits.max_drafts,
            )  # fmt: skip
            graphs.capture()
            return graphs
        if self._platform.computes_alone:
            return eager
        reason = obstacle(head)
        if reason is None:
            # a level of trees has as many rows as there are drafts
            max_sampled = limits.max_num_seqs if self._tree is None else limits.max_sampled
            return NativeSteps(device, head, own, tables, pool.features, max_rows=max_rows, max_sampled=max_sampled)
        level = logging.INFO if head.n_ranks > 1 else logging.WARNING  # somebody has asked for ranks
        logger.log(level, "steps of the head run operation by operation: %s", reason)
        return eager
