"""What a beam search on the null device must find, said independently of the scheduler: by looking at all beams."""

from __future__ import annotations

import dataclasses

from control_model import VOCAB, Ledger

from quire.control.slot_params import slot_params
from quire.core.events import FinishReason, SeqDelta
from quire.core.request import Request
from quire.engine.executors.digests import State, choose, null_logprobs


def next_scores(request: Request, tokens: list[int], windows: tuple[int, ...], n: int) -> list[tuple[int, float]]:
    """The candidates that the null device must report behind these tokens."""
    states = [State(window) for window in windows]
    for token in tokens:
        for state in states:
            state.add(state.row(token))
    found = choose(states, slot_params(request, 0), len(tokens), VOCAB)
    assert found is not None
    row = null_logprobs(found, n, VOCAB)
    return list(zip(row.top_ids, row.top_logprobs, strict=True))


def null_beams(request: Request, windows: tuple[int, ...]) -> list[tuple[list[int], float]]:
    """(output, sum of log-probabilities) of the `n` best hypotheses, as transformers' search finds them."""
    terms, ends = request.beams, set(request.end_token_ids)
    assert terms is not None
    width, penalty = terms.width, terms.length_penalty
    n = max(2, 1 + len(ends)) * width
    running: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[float, list[int], float]] = []
    for length in range(1, request.max_tokens + 1):
        every = [
            ([*said, token], score + logprob) for said, score in running
            for token, logprob in next_scores(request, request.prompt_token_ids + said, windows, n)
        ]  # fmt: skip
        best = sorted(every, key=lambda one: -one[1])[:n]
        was_full = len(done) == width
        stops = [said[-1] in ends or length == request.max_tokens for said, _ in best]
        if not (was_full and terms.early_stopping is True):
            done += [
                (score / length**penalty, said, score)
                for (said, score), stop in zip(best[:width], stops, strict=False) if stop
            ]  # fmt: skip
        done = sorted(done, key=lambda one: -one[0])[:width]
        running = [one for one, stop in zip(best, stops, strict=True) if not stop][:width]
        if not running:
            break
        if len(done) == width:
            is_patient = terms.early_stopping == "never" and penalty > 0
            hoped = running[0][1] / (request.max_tokens if is_patient else length) ** penalty
            if terms.early_stopping is True or hoped <= done[-1][0]:
                break
    return [(said, score) for _, said, score in done[: request.params.n]]


@dataclasses.dataclass
class Search:
    """One beam search; it stands in the ledger as one sequence."""

    request: Request
    order: tuple[int, int, int]
    found: list[tuple[list[int], float]]
    tokens: list[int] = dataclasses.field(default_factory=list)
    index: int = 0
    n_heard: int = 0
    ended: bool = False

    @property
    def name(self) -> tuple[str, int]:
        return self.request.request_id, 0


class BeamLedger(Ledger):
    """Knows searches beside sequences."""

    def add(self, request: Request, number: int, priority: int) -> None:
        if request.beams is None:
            super().add(request, number, priority)
            return
        search = Search(request, (priority, number, 0), null_beams(request, self.windows))
        self.seqs[search.name] = search  # type: ignore[assignment]

    def hear(self, delta: SeqDelta, may_fail: bool) -> None:
        search = self.seqs[delta.request_id, 0]
        if not isinstance(search, Search):
            super().hear(delta, may_fail)
            return
        assert not search.ended, "a search spoke after its end"
        if delta.finish_reason is FinishReason.ERROR:
            assert may_fail and delta.index == 0
            search.ended = True
            return
        said, score = search.found[search.n_heard]
        assert delta.index == search.n_heard
        assert (delta.token_ids, delta.cum_logprob) == (said, score), "other hypotheses than the reference has"
        is_end = said[-1] in search.request.end_token_ids
        assert delta.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
        assert delta.stop_token == (said[-1] if is_end else None)
        if search.request.params.logprobs is not None:
            rows = [] if delta.logprobs is None else delta.logprobs.rows()
            assert len(rows) == len(said) and abs(sum(row.chosen for row in rows) - score) < 1e-4
        self.n_generated += len(said)
        search.n_heard += 1
        search.ended = search.n_heard == search.request.params.n

    def _could_serve(self, other: object, seq: object) -> bool:  # type: ignore[override]
        """Beams leave what they have computed, whatever came of it."""
        return isinstance(other, Search) or super()._could_serve(other, seq)  # type: ignore[arg-type]
