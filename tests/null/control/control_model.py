"""What must come out, said independently of the scheduler: a reference for every sequence, and a ledger of ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from quire.config.kv import KVGroup, KVLayout, KVSpec
from quire.core.events import FinishReason, SeqDelta
from quire.core.logprobs import PackedLogprobs
from quire.core.plan import SlotParams
from quire.core.request import Pooling, Request
from quire.engine.executors.digests import null_logprobs, null_reference

VOCAB = 7


def may_follow(tokens: Sequence[int]) -> set[int]:
    """The grammar of constrained sequences: two ids are excluded, by all tokens so far."""
    number = 3 * sum(tokens) + len(tokens)
    return set(range(VOCAB)) - {number % VOCAB, (5 * number + 1) % VOCAB}


def layout_of(*windows: int) -> KVLayout:
    """A group of one layer for each window."""
    return KVLayout(tuple(KVGroup(KVSpec(1, 1, window), (i,)) for i, window in enumerate(windows)), 1)


@dataclasses.dataclass
class Expected:
    """One sequence: what it must say, what it has said."""

    request: Request
    index: int
    order: tuple[int, int, int]
    tokens: list[int]
    reason: FinishReason
    said: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False
    n_cached: int | None = None

    @property
    def name(self) -> tuple[str, int]:
        return self.request.request_id, self.index


def expect(request: Request, index: int, order: tuple[int, int, int], windows: tuple[int, ...] = (0,)) -> Expected:
    """Run the reference and apply the stop rules by hand."""
    params, prompt_len = request.params, len(request.prompt_token_ids)
    stops = {*request.end_token_ids, *params.stop_token_ids}
    slot = SlotParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, seed=request.seed + index, logprobs=-1, prompt_logprobs=-1, logit_bias={},
        allowed_token_ids=None, bad_token_seqs=[], masked_end_ids=sorted(stops),
        masked_until=prompt_len + params.min_tokens,
    )  # fmt: skip
    if request.pooling is not None:
        return Expected(request, index, order, [], FinishReason.STOP)
    grammar = may_follow if request.is_constrained else None
    tokens = null_reference(request.prompt_token_ids, slot, request.max_tokens, VOCAB, windows, grammar)
    for i, token in enumerate(tokens):
        if token in stops and i >= params.min_tokens:
            return Expected(request, index, order, tokens[: i + 1], FinishReason.STOP)
    return Expected(request, index, order, tokens, FinishReason.LENGTH)


def null_pooled(request: Request) -> list[float]:
    """The null device's states are a token and its position: their last ones, or their means."""
    prompt = request.prompt_token_ids
    if request.pooling is Pooling.LAST:
        return [prompt[-1], len(prompt) - 1]
    return [sum(prompt) / len(prompt), sum(range(len(prompt))) / len(prompt)]


class Ledger:
    """All sequences ever submitted, by (request id, index)."""

    def __init__(self, windows: tuple[int, ...] = (0,)) -> None:
        self.windows = windows
        self.seqs: dict[tuple[str, int], Expected] = {}
        self.n_generated = 0

    def add(self, request: Request, number: int, priority: int) -> None:
        for index in range(request.params.n):
            self.seqs[request.request_id, index] = expect(request, index, (priority, number, index), self.windows)

    @property
    def n_ended(self) -> int:
        return sum(seq.ended for seq in self.seqs.values())

    def live(self) -> list[Expected]:
        return [seq for seq in self.seqs.values() if not seq.ended]

    def end(self, request_id: str, index: int | None = None) -> None:
        """A cancellation: nothing may follow."""
        for name, seq in self.seqs.items():
            if name[0] == request_id and index in (None, name[1]):
                seq.ended = True

    def hear(self, delta: SeqDelta, may_fail: bool) -> None:
        """E 27, 29 and F 31, 32: the next tokens of the reference, logprobs for each, one end, nothing after it."""
        seq = self.seqs[delta.request_id, delta.index]
        assert not seq.ended, f"{seq.name} spoke after its end"
        if not seq.said and delta.finish_reason is not FinishReason.ERROR:
            self._hear_first(seq, delta)
        seq.said += delta.token_ids
        self.n_generated += len(delta.token_ids)
        assert seq.said == seq.tokens[: len(seq.said)], f"{seq.name} said {seq.said}, the reference says {seq.tokens}"
        if seq.request.params.logprobs is not None and delta.finish_reason is not FinishReason.ERROR:
            n_top = seq.request.params.logprobs
            rows = [null_logprobs(token, n_top, VOCAB) for token in delta.token_ids]
            assert delta.logprobs == PackedLogprobs.of(rows)
        else:
            assert delta.logprobs is None
        if delta.finish_reason is FinishReason.ERROR:
            assert may_fail and delta.failure and not delta.token_ids, f"{seq.name} failed without a fault"
            seq.ended = True
        elif seq.request.pooling is not None:
            assert delta.finish_reason is FinishReason.STOP and not delta.token_ids and delta.stop_token is None
            assert delta.pooled == null_pooled(seq.request)
            assert delta.n_cached == 0 or seq.request.pooling is Pooling.LAST
            seq.ended = True
        elif delta.finish_reason is not None:
            assert seq.said == seq.tokens and delta.finish_reason is seq.reason
            assert delta.stop_token == (seq.tokens[-1] if seq.reason is FinishReason.STOP else None)
            seq.ended = True
        else:
            assert delta.token_ids and len(seq.said) < len(seq.tokens), f"{seq.name} did not end where it must"

    def _hear_first(self, seq: Expected, delta: SeqDelta) -> None:
        """B 11, 14: what is found in the cache was put there under the same salt, and is never the whole prompt."""
        seq.n_cached = delta.n_cached
        prompt = seq.request.prompt_token_ids
        assert 0 <= delta.n_cached < len(prompt)
        if seq.request.params.prompt_logprobs is not None and seq.index == 0:
            n_top = seq.request.params.prompt_logprobs
            assert delta.prompt_logprobs == PackedLogprobs.of([null_logprobs(one, n_top, VOCAB) for one in prompt[1:]])
            assert delta.n_cached == 0
        else:
            assert delta.prompt_logprobs is None
        if delta.n_cached:
            sources = [other for other in self.seqs.values() if other is not seq and self._could_serve(other, seq)]
            assert sources, f"{seq.name} found {delta.n_cached} tokens that nobody of its salt had"

    @staticmethod
    def _could_serve(other: Expected, seq: Expected) -> bool:
        said = [*other.request.prompt_token_ids, *other.tokens]
        same = said[: seq.n_cached] == seq.request.prompt_token_ids[: seq.n_cached]
        return same and other.request.cache_salt == seq.request.cache_salt
