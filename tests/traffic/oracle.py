"""transformers as the judge: every output token and logprob of the engine against one forward over the whole text.

A sequence is judged by what it was given, so a near-tie that went the other way does not spoil what follows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.compute.runner.pool import KVPool
from quire.control.node import Node
from quire.control.tree import PrefixTree
from quire.core.events import FinishReason
from quire.core.failure import Failure
from quire.core.logprobs import TokenLogprobs
from quire.core.request import Request
from traffic.rules import Control, explains, is_best

ROWS_AT_ONCE = 1 << 14
"""Tokens of one forward, padding included."""


@dataclasses.dataclass(slots=True)
class Record:
    """One sequence as its client saw it."""

    request: Request
    index: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    failure: Failure | None = None

    @property
    def name(self) -> str:
        return f"{self.request.request_id}[{self.index}]"

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return self.request.prompt_token_ids + self.token_ids


@dataclasses.dataclass(slots=True)
class Verdicts:
    """What was judged so far."""

    n_tokens: int = 0
    n_best: int = 0
    """Of these, the very choice of transformers' logits; the others are within the error of a border."""
    n_greedy: int = 0
    n_greedy_best: int = 0
    n_logprobs: int = 0
    logprob_error: float = 0.0
    """Sum of absolute differences of chosen logprobs."""
    worst_logprob: float = 0.0
    n_pages: int = 0
    """Pages of the prefix tree compared with transformers' keys and values."""
    worst_key: float = 0.0
    """Largest root mean square difference in one of these pages, relative to that of the keys (values) of its path."""
    faults: list[str] = dataclasses.field(default_factory=list)


class Oracle:
    """`error`: how far logits of the engine may be from those of `model`, which runs in float32 on its own device;
    `key_error`: how far keys and values may be, as root mean square of a page."""

    def __init__(self, model: transformers.PreTrainedModel, error: float, key_error: float) -> None:
        self.model = model
        self.error, self.key_error = error, key_error
        self.verdicts = Verdicts()

    def judge(self, records: Iterable[Record]) -> None:
        """Add the verdicts on these sequences."""
        waiting = sorted((one for one in records if one.token_ids), key=lambda one: len(one.ids))
        while waiting:
            n = max(1, min(len(waiting), ROWS_AT_ONCE // len(waiting[-1].ids)))
            batch, waiting = waiting[-n:], waiting[:-n]
            for record, logits in zip(batch, self._logits(batch), strict=True):
                self._judge(record, logits)

    @torch.inference_mode()
    def judge_pages(self, tree: PrefixTree, pool: KVPool, n_paths: int = 4) -> None:
        """Compare the keys and values of some paths of the tree, the longest, with transformers'; no step may run."""
        nodes = [node for root in tree.roots.values() for node in tree.subtree(root) if not node.children]
        paths = sorted(((path_of(node), node.salt) for node in nodes), key=lambda one: -len(one[0][0]))
        for (ids, tables), salt in paths[:n_paths]:
            cache = transformers.DynamicCache()
            self._forward(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            worst = 0.0
            for layer, right in enumerate(cache.layers):
                pages = torch.tensor(tables[pool.group_of[layer]], device=pool.k.device)
                held = pages.nonzero()[:, 0]  # without those behind a window that are gone
                for stored, expected in zip(pool.pages_of[layer], (right.keys[0], right.values[0]), strict=True):
                    expected = expected.unflatten(1, (len(pages), -1)).transpose(0, 1)
                    off = (stored[pages[held]].float() - expected[held]).square().flatten(1).mean(1)
                    share = float((off / expected.square().mean()).max().sqrt()) if len(held) else 0.0
                    worst = max(worst, _finite(share))
            self.verdicts.n_pages += sum(page > 0 for table in tables for page in table)
            self.verdicts.worst_key = max(self.verdicts.worst_key, worst)
            if worst > self.key_error:
                self.verdicts.faults.append(
                    f"cached K/V of {salt!r} is wrong by {worst:.4g} in pages {tables} for {ids}"
                )

    @torch.inference_mode()
    def _logits(self, batch: list[Record]) -> list[np.ndarray]:
        """For each sequence float64 [n, vocab]: rows that predict its outputs, or all tokens but the first."""
        longest = max(len(one.ids) for one in batch)
        padded = torch.tensor([one.ids + [0] * (longest - len(one.ids)) for one in batch])  # causal: padding is unseen
        logits = self._forward(padded, use_cache=False).logits
        found = []
        for row, one in zip(logits, batch, strict=True):
            found.append(row[first_row(one) : len(one.ids) - 1].cpu().double().numpy())
        return found

    def _forward(self, ids: torch.Tensor, **options: Any) -> Any:
        """Without TF32: on CUDA only the plain kernels promise that."""
        device = self.model.device
        plain = sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext()
        with plain:
            return self.model(ids.to(device), **options)

    def _judge(self, record: Record, logits: np.ndarray) -> None:
        control, prompt_len = Control(record.request, record.index), len(record.request.prompt_token_ids)
        at, verdicts = prompt_len - 1 - first_row(record), self.verdicts
        for i, token in enumerate(record.token_ids):
            position, row = prompt_len + i, logits[at + i]
            x = control.edited(row, record.ids[:position])
            best = is_best(control, x, token, position)
            verdicts.n_tokens += 1
            verdicts.n_best += best
            verdicts.n_greedy += control.is_greedy
            verdicts.n_greedy_best += control.is_greedy and best
            if not best and not explains(control, x, token, position, self.error):
                what = f"token {token} at {position}, {x.max() - x[token]:.4f} behind the best"
                verdicts.faults.append(f"{record.name}: wrong {what}; {described(record)}")
                return  # what follows depends on the same keys
        if record.logprobs:
            self._judge_lines(record, record.logprobs, logits[at:], record.token_ids, record.request.params.logprobs)
        if record.prompt_logprobs is not None:
            targets, n_top = record.request.prompt_token_ids[1:], record.request.params.prompt_logprobs
            self._judge_lines(record, record.prompt_logprobs, logits, targets, n_top)

    def _judge_lines(
        self, record: Record, lines: list[TokenLogprobs], logits: np.ndarray, targets: list[int], n_top: int | None
    ) -> None:
        for i, (line, token) in enumerate(zip(lines, targets, strict=True)):
            x = logits[i]
            table = x - x.max() - np.log(np.exp(x - x.max()).sum())
            difference = _finite(line.chosen - table[token])
            self.verdicts.n_logprobs += 1
            self.verdicts.logprob_error += difference
            self.verdicts.worst_logprob = max(self.verdicts.worst_logprob, difference)
            width = 2 * self.error
            least = np.partition(x, len(x) - n_top)[len(x) - n_top] if n_top else np.inf
            fine = (
                difference <= width
                and (x > x[token] + width).sum() < line.rank <= (x >= x[token] - width).sum()
                and len(line.top_ids) == len(set(line.top_ids)) == n_top
                and np.all(np.abs(table[line.top_ids] - line.top_logprobs) <= width)
                and np.all(x[line.top_ids] >= least - width)
                and sorted(line.top_logprobs, reverse=True) == line.top_logprobs
            )
            if not fine:
                what = f"logprobs of row {i}: {line} where {table[token]:.4f} is right"
                self.verdicts.faults.append(f"{record.name}: wrong {what}; {described(record)}")
                return


def _finite(difference: float) -> float:
    """Its size; something huge that JSON can hold in place of NaN."""
    return min(abs(float(np.nan_to_num(difference, nan=1e9))), 1e9)


def described(record: Record) -> str:
    """What it takes to try again, and what came."""
    request = record.request
    return f"{request.params}, seed {request.seed}, prompt {request.prompt_token_ids}, output {record.token_ids}"


def path_of(node: Node) -> tuple[list[int], list[list[int]]]:
    """Tokens, and pages of each group (0 for one that is gone), from the root of the prefix tree down to `node`."""
    ids: list[int] = []
    tables: list[list[int]] = [[] for _ in node.tables]
    step: Node | None = node
    while step is not None:
        ids = step.tokens + ids
        tables = [own + below for own, below in zip(step.tables, tables, strict=True)]
        step = step.parent
    return ids, tables


def first_row(record: Record) -> int:
    """The first position whose logits are needed."""
    return 0 if record.prompt_logprobs is not None else len(record.request.prompt_token_ids) - 1
