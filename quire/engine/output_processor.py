"""From `SeqDelta`s to `RequestOutput`s: incremental text, stop strings, logprobs with token strings.

Owns the text state of open requests of one client. Does not own stopping by token (`control`).
Invariants: the pieces of text of a sequence join to its whole text; nothing follows a finish reason; what goes wrong
in one request's text ends that request alone.
"""

from __future__ import annotations

import collections
import io
import logging

from quire.core.clock import Clock
from quire.core.commands import Cancel, CancelSeq
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code, Failure
from quire.core.logprobs import LogprobRows, PackedLogprobs
from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.core.request import Request
from quire.core.sampling import OutputKind
from quire.text.output import TextStream
from quire.text.stop import StopStrings
from quire.text.tokenizer import HfTokenizer

logger = logging.getLogger("quire.engine")

PIECE_CELLS = 2048
READ_CELLS = 4096
"""About a millisecond of work in an API process."""
OUTPUT_FAILED = Failure(Code.OUTPUT_FAILED, "the engine's tokens could not be turned into output; see its log")


class OpenRequest:
    """All state of one request between submission and its last output."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: HfTokenizer | None,
        clock: Clock,
        request_id: str | None = None,
    ) -> None:
        """request_id: the caller's name for it, carried by its outputs; None takes the internal one."""
        params = request.params
        self.request = request
        self.request_id = request_id or request.request_id
        self.prompt = prompt
        self.metrics = RequestMetrics(arrival_s=request.arrival_s)
        self.completions = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(params.n)]
        self.n_cached = 0
        self.prompt_logprobs: LogprobRows | None = None
        self.pooled: list[float] | None = None
        self._tokenizer = tokenizer
        self._clock = clock
        self._name = _no_name if tokenizer is None else tokenizer.token_text
        self._n_open = params.n
        self._said = [io.StringIO() for _ in self.completions]
        """The text of each completion that is not in its `text` yet."""
        if params.logprobs is not None:
            for completion in self.completions:
                completion.logprobs, completion.cumulative_logprob = LogprobRows(self._name), 0.0
        stops = StopStrings(params.stop) if params.stop else None
        self._texts = (
            [TextStream(tokenizer, params, stops) for _ in self.completions]
            if tokenizer is not None and params.detokenize
            else []
        )

    @property
    def finished(self) -> bool:
        """True once every completion has a finish reason."""
        return self._n_open == 0

    def has_reached(self, n_tokens: int) -> bool:
        """True once each completion has so many tokens, or has ended otherwise than by an error."""
        ends = (None, FinishReason.ERROR.value)
        return all(len(one.token_ids) >= n_tokens or one.finish_reason not in ends for one in self.completions)

    def fresh(self) -> OpenRequest:
        """The same request before its first output."""
        return OpenRequest(self.request, self.prompt, self._tokenizer, self._clock, self.request_id)

    def take(
        self, delta: SeqDelta, *, wants_parts: bool = True
    ) -> tuple[list[CompletionOutput], Cancel | CancelSeq | None]:
        """Apply one delta: (new parts, what the engine must be told).

        wants_parts: new parts are read as they come, and with OutputKind.DELTA nothing else is kept; False: the list is
        empty for the parts of tokens, for who reads the completions at the end. Parts are empty if the completion had
        ended already. The engine is told when a stop string ended a sequence, and when this delta could not be turned
        into output, which ends the whole request with an error.
        """
        try:
            return self._take(delta, wants_parts)
        except Exception:
            logger.exception("request %s: its output failed", self.request.request_id)
            return self.end(FinishReason.ERROR, OUTPUT_FAILED), Cancel([self.request.request_id])

    def end(self, reason: FinishReason, failure: Failure | None = None) -> list[CompletionOutput]:
        """Finish every open completion without the engine; returns their last parts. Text held back is lost."""
        parts = []
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason, completion.failure = reason.value, failure
                parts.append(
                    _part(completion, "", [], None if completion.logprobs is None else LogprobRows(self._name))
                )
        self._n_open = 0
        self.metrics.finished_s = self._clock.now_s()
        return parts

    def _take(self, delta: SeqDelta, wants_parts: bool) -> tuple[list[CompletionOutput], Cancel | CancelSeq | None]:
        completion = self.completions[delta.index]
        if completion.finish_reason is not None:
            return [], None
        now_s = self._clock.now_s()
        if delta.token_ids and self.metrics.first_token_s is None:
            self.metrics.first_token_s, self.metrics.queued_s = now_s, delta.queued_s
        if delta.index == 0:
            self.n_cached = max(self.n_cached, delta.n_cached)
            self.pooled = delta.pooled
            if delta.prompt_logprobs is not None:
                prompt = self.request.prompt_token_ids
                self.prompt_logprobs = LogprobRows(self._name, prompt[0])
                self.prompt_logprobs.add(delta.prompt_logprobs, prompt[1:])
        if self.request.beams is not None and delta.finish_reason is FinishReason.ERROR:
            parts = self.end(FinishReason.ERROR, delta.failure)  # a search fails as a whole
            return parts if wants_parts else [], None
        text, logprobs = self._advance(completion, delta)
        if not wants_parts or self.request.params.output_kind is not OutputKind.DELTA:
            self._keep(completion, text, delta.token_ids, logprobs)
        parts = [self._new_part(completion, text, delta.token_ids, logprobs)] if wants_parts else []
        if completion.finish_reason is None:
            return parts, None
        self._n_open -= 1
        if self.finished:
            self.metrics.finished_s = now_s
        stopped_here = isinstance(completion.stop_reason, str) and delta.finish_reason is None
        return parts, CancelSeq(delta.request_id, delta.index) if stopped_here else None

    def _keep(
        self, completion: CompletionOutput, text: str, token_ids: list[int], logprobs: PackedLogprobs | None
    ) -> None:
        self._said[completion.index].write(text)
        completion.token_ids += token_ids
        if logprobs is not None and completion.logprobs is not None:
            completion.logprobs.add(logprobs, token_ids)

    def _new_part(
        self, completion: CompletionOutput, text: str, token_ids: list[int], logprobs: PackedLogprobs | None
    ) -> CompletionOutput:
        rows = None
        if logprobs is not None:
            rows = LogprobRows(self._name)
            rows.add(logprobs, token_ids)
        return _part(completion, text, token_ids, rows)

    def _advance(self, completion: CompletionOutput, delta: SeqDelta) -> tuple[str, PackedLogprobs | None]:
        """Apply the delta to its completion; returns its text and logprobs."""
        reason = delta.finish_reason.value if delta.finish_reason is not None else None
        stop_reason: int | str | None = delta.stop_token
        if stop_reason in self.request.end_token_ids:
            stop_reason = None
        text = ""
        if self._texts:
            hidden = delta.stop_token is not None and not self.request.params.include_stop_str_in_output
            shown = delta.token_ids[:-1] if hidden else delta.token_ids
            text, stop = self._texts[completion.index].feed(shown, reason is not None)
            if stop is not None:
                reason, stop_reason = FinishReason.STOP.value, stop
        logprobs = None
        if delta.logprobs is not None and completion.logprobs is not None:
            logprobs = delta.logprobs
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + logprobs.sum_of_chosen()
        if delta.cum_logprob is not None:
            completion.cumulative_logprob = delta.cum_logprob
        completion.finish_reason, completion.stop_reason, completion.failure = reason, stop_reason, delta.failure
        return text, logprobs

    def whole(self) -> list[CompletionOutput]:
        """All completions as far as they have come; without their content if it was handed out in parts."""
        for completion, said in zip(self.completions, self._said, strict=True):
            completion.text = said.getvalue()
        return self.completions

    def output(self, parts: list[CompletionOutput], *, more: bool = False) -> RequestOutput | None:
        """What the user gets for these new parts, by `params.output_kind`; None if nothing is to be shown yet. more:
        other parts wait behind these."""
        kind = self.request.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=parts if kind is OutputKind.DELTA else self.whole(),
            finished=self.finished and not more,
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            num_cached_tokens=self.n_cached,
            metrics=self.metrics,
        )


def _no_name(_token: int) -> None:
    """Of a token, without a tokenizer."""


def _part(
    completion: CompletionOutput, text: str, token_ids: list[int], logprobs: LogprobRows | None
) -> CompletionOutput:
    """The newest part of a completion, which stands as it is after it."""
    return CompletionOutput(
        completion.index,
        text,
        token_ids,
        completion.cumulative_logprob,
        logprobs,
        completion.finish_reason,
        completion.stop_reason,
        completion.failure,
    )


class PartBuffer:
    """New parts of a request's completions while nobody reads. Those of one completion are joined into pieces of about
    `PIECE_CELLS`, and one reading takes at most about `READ_CELLS`, so that what piled up is not laid out at once."""

    def __init__(self) -> None:
        self._pieces: dict[int, collections.deque[CompletionOutput]] = {}

    def put(self, part: CompletionOutput) -> None:
        """Add the next part of a completion. It becomes the buffer's own, but for its list of tokens."""
        pieces = self._pieces.setdefault(part.index, collections.deque())
        if not pieces or _n_cells(pieces[-1]) >= PIECE_CELLS:
            part.token_ids = list(part.token_ids)
            pieces.append(part)
            return
        last = pieces[-1]
        last.text += part.text
        last.token_ids += part.token_ids
        if last.logprobs is None:
            last.logprobs = part.logprobs
        elif part.logprobs is not None:
            last.logprobs.join(part.logprobs)
        last.cumulative_logprob = part.cumulative_logprob
        last.finish_reason, last.stop_reason, last.failure = part.finish_reason, part.stop_reason, part.failure

    def take(self) -> list[CompletionOutput]:
        """What came first of each completion, in order of first arrival; the rest, if there is any, is left."""
        n_cells, parts = 0, []
        for index in list(self._pieces):
            pieces = self._pieces[index]
            part = pieces.popleft()
            parts.append(part)
            if pieces:
                self._pieces[index] = self._pieces.pop(index)  # to the end: the others are first next time
            else:
                del self._pieces[index]
            n_cells += _n_cells(part)
            if n_cells >= READ_CELLS:
                break
        return parts

    def __bool__(self) -> bool:
        return bool(self._pieces)


def _n_cells(part: CompletionOutput) -> int:
    """How much a part gives to lay out: its tokens and the values of its logprobs."""
    return len(part.token_ids) + (0 if part.logprobs is None else part.logprobs.n_cells)
