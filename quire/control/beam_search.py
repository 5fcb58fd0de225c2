"""`BeamSearch`: one beam search, from what its beams report to which beams go on, and which hypotheses have ended.

The search is that of transformers' `generate(num_beams=...)`: Graves 2012, "Sequence transduction", and the length
penalty of Wu et al. 2016, equation 14, in its plain form (log-probability / length ** penalty).
Owns beams, scores and the order of both. Does not own pages nor slots (`forking.py`, `live_seqs.py`).
Invariants: all beams have one length; a beam is the known tokens of its source and a tail behind them; a member (the
sequence of a beam) is planned no further than its known tokens, so that it waits for the choice of its next one.
"""

from __future__ import annotations

import dataclasses

from quire.control.config import SchedulerConfig
from quire.control.seq import InvariantError, Seq
from quire.core.beams import MAX_PENALTY, MAX_WIDTH
from quire.core.errors import ContextLengthExceeded, InvalidParameter
from quire.core.events import FinishReason, SeqDelta
from quire.core.logprobs import PackedLogprobs, TokenLogprobs
from quire.core.request import Request


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """Where a token of a beam stood among its candidates, and the tokens before it: beams share their beginnings."""

    reported: TokenLogprobs
    rank: int
    """1 = the most probable."""
    before: Row | None


@dataclasses.dataclass(slots=True, eq=False)
class Beam:
    """A living beam. Once a member of the search goes on with it, that is its source, and `tail` is empty."""

    source: Seq
    tail: list[int]
    score: float
    """Sum of its log-probabilities."""
    rows: Row | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.source.tokens + self.tail


@dataclasses.dataclass(slots=True, eq=False)
class Hypothesis:
    """A beam that has ended."""

    rank: float
    """By which hypotheses are compared."""
    tokens: list[int]
    """The output."""
    score: float
    end_token: int | None
    rows: Row | None


class BeamSearch:
    """See the module."""

    def __init__(self, root: Seq) -> None:
        """root: the sequence by which the request waits, enters and ends. It always is the first member."""
        request = root.request
        assert request.beams is not None
        self.root = root
        self.terms = request.beams
        self.width = self.terms.width
        self.n_candidates = n_candidates(request)
        self.members = [root]
        """Sequences with a slot (or waiting: the root alone)."""
        self.beams = [Beam(root, [], 0.0)]
        """The best first."""
        self.is_placed = True
        """Every beam has a member of its own."""
        self.is_ready = False
        """Beams are to be placed by the next plan."""
        self.sampled: dict[Seq, int] = {}
        """What the device has put behind the known tokens of a member."""
        self._reports: dict[Seq, TokenLogprobs] = {}
        self._ended: list[Hypothesis] = []
        """The best `width`, the best first."""
        self._end_ids = frozenset(request.end_token_ids)
        root.limit = len(root.tokens)

    # ---- what the host hears -------------------------------------------------------------------------------------

    def report(self, member: Seq, token: int, row: TokenLogprobs) -> bool:
        """A member's next tokens are known. True if that ends the search."""
        self.sampled[member] = token
        if not self.is_placed:  # the root has computed again what all beams begin with
            self.is_ready = True
            return False
        self._reports[member] = row
        return len(self._reports) == len(self.beams) and self._choose()

    def _choose(self) -> bool:
        """The best candidates of all beams: ends and new beams. True if the search is over."""
        request, width = self.root.request, self.width
        prompt_len, n_known = self.root.prompt_len, len(self.beams[0].source.tokens)
        length = n_known + 1 - prompt_len
        is_last = length >= request.max_tokens
        found = [
            (beam.score + logprob, beam, token, rank)
            for beam in self.beams
            for rank, (token, logprob) in enumerate(self._candidates(beam), 1)
        ]
        found.sort(key=lambda one: -one[0])  # of equal ones the better beam's, then the more probable token first
        is_full = len(self._ended) == width and self.terms.early_stopping is True
        ended: list[Hypothesis] = []
        beams: list[Beam] = []
        for place, (score, beam, token, rank) in enumerate(found[: self.n_candidates]):
            is_end = token in self._end_ids
            rows = Row(self._reports[beam.source], rank, beam.rows)
            if not (is_end or is_last):
                if len(beams) < width:
                    beams.append(Beam(beam.source, [token], score, rows))
            elif place < width and not is_full:
                tokens = [*beam.source.tokens[prompt_len:], token]
                ended.append(Hypothesis(self._rank(score, length), tokens, score, token if is_end else None, rows))
        self._ended = sorted(self._ended + ended, key=lambda one: -one.rank)[:width]
        self.beams, self.is_placed, self.is_ready = beams, False, True
        self._reports.clear()
        return is_last or not beams or not self._can_improve(length)

    def _candidates(self, beam: Beam) -> list[tuple[int, float]]:
        row, n = self._reports[beam.source], self.n_candidates
        return list(zip(row.top_ids[:n], row.top_logprobs[:n], strict=True))

    def _rank(self, score: float, length: int) -> float:
        rank: float = score / length**self.terms.length_penalty
        return rank

    def _can_improve(self, length: int) -> bool:
        """Whether a living beam is expected to end better than the worst of `width` that have ended."""
        if len(self._ended) < self.width:
            return True
        if self.terms.early_stopping is True:
            return False
        is_patient = self.terms.early_stopping == "never" and self.terms.length_penalty > 0
        best = self._rank(self.beams[0].score, self.root.request.max_tokens if is_patient else length)
        return best > self._ended[-1].rank

    def deltas(self) -> list[SeqDelta]:
        """The whole of each hypothesis, once the search is over."""
        request, n = self.root.request, self.root.request.params.n
        if len(self._ended) < n:
            raise InvariantError(f"a beam search ended with {len(self._ended)} of {n} hypotheses")
        found = []
        for index, one in enumerate(self._ended[:n]):
            reason = FinishReason.LENGTH if one.end_token is None else FinishReason.STOP
            delta = SeqDelta(request.request_id, index, one.tokens, reason, one.end_token, cum_logprob=one.score)
            delta.n_cached, delta.queued_s = self.root.first_cached, self.root.queued_s
            if request.params.logprobs is not None:
                delta.logprobs = _packed(one.rows, request.params.logprobs)
            found.append(delta)
        return found

    # ---- what becomes of its members -------------------------------------------------------------------------------

    def place(self, beam: Beam, member: Seq) -> None:
        """`member` has the tokens of a beam now."""
        beam.source, beam.tail = member, []
        member.limit = len(member.tokens)

    def fold(self) -> None:
        """No member has pages any more: the root stands for what all beams begin with, and computes that again."""
        self._reports.clear()
        self.sampled.clear()
        self.members = [self.root]
        if self.is_placed and len(self.beams) == 1:
            return
        tokens = [beam.tokens for beam in self.beams]
        n_common, most = 0, len(tokens[0]) - 1
        while n_common < most and len({each[n_common] for each in tokens}) == 1:
            n_common += 1
        self.root.tokens = tokens[0][:n_common]
        self.root.limit = n_common
        for beam, own in zip(self.beams, tokens, strict=True):
            beam.source, beam.tail = self.root, own[n_common:]
        self.is_placed = self.is_ready = False

    @property
    def n_lacking(self) -> int:
        """Slots that its beams will take beside those that they have."""
        return self.width - len(self.members)

    def tail_pages(self, config: SchedulerConfig) -> int:
        """Pages that its members take for one more token, at most, beside those that the root has for what it knows."""
        n_shared = len(self.root.tokens) // config.page_size
        most = self.root.prompt_len + self.root.request.max_tokens - 1  # the last token of an output is not computed
        longest = min(len(self.beams[0].source.tokens) + max(1, len(self.beams[0].tail)), most)
        n_pages = config.pages_for(longest) - n_shared
        return self.width * sum([min(n_pages, enough) for enough in config.pages_of(longest)])


def n_candidates(request: Request) -> int:
    """Next tokens that each beam of a request reports."""
    assert request.beams is not None
    return request.beams.n_candidates(len(set(request.end_token_ids)))


def check_beams(config: SchedulerConfig, request: Request) -> None:
    """RequestError for a search that could never run, even alone: its prompt is shared, the outputs may all differ."""
    assert request.beams is not None
    width, prompt_len = request.beams.width, len(request.prompt_token_ids)
    if config.has_states:
        raise InvalidParameter("beam_width", width, "absent: beams of a model with recurrent states are not forked")
    if not 1 <= width <= MAX_WIDTH:
        raise InvalidParameter("beam_width", width, f"an integer between 1 and {MAX_WIDTH}")
    if not abs(request.beams.length_penalty) <= MAX_PENALTY:  # larger powers of a length are no floats
        raise InvalidParameter("length_penalty", request.beams.length_penalty, f"within ±{MAX_PENALTY}")
    if width > config.max_num_seqs:
        raise InvalidParameter("beam_width", width, f"at most max_num_seqs = {config.max_num_seqs}, one slot a beam")
    if request.params.n > width:
        raise InvalidParameter("n", request.params.n, f"at most beam_width = {width}")
    n_shared = prompt_len // config.page_size * config.kv.n_full
    each = sum(config.pages_of(prompt_len + request.max_tokens - 1)) - n_shared
    n_pages = n_shared + width * each + len(config.kv.windows)
    if n_pages > config.n_usable_pages:
        raise ContextLengthExceeded(
            f"{width} beams of a prompt ({prompt_len}) plus output ({request.max_tokens}) may need {n_pages} KV pages, "
            f"the pool has {config.n_usable_pages}: lower beam_width or max_tokens, or give the pool more memory"
        )


def _packed(rows: Row | None, n_top: int) -> PackedLogprobs:
    """What was reported of the tokens of a hypothesis, in order."""
    found: list[TokenLogprobs] = []
    while rows is not None:
        row, at = rows.reported, rows.rank - 1
        found.append(TokenLogprobs(row.top_logprobs[at], rows.rank, row.top_ids[:n_top], row.top_logprobs[:n_top]))
        rows = rows.before
    return PackedLogprobs.of(found[::-1])
