"""From `SeqDelta`s to `RequestOutput`s: incremental text, stop strings, logprobs with token strings.

Owns the text state of open requests of one client. Does not own stopping by token (`control`).
Invariants: the pieces of text of a sequence join to its whole text; nothing follows a finish reason; what goes wrong
in one request's text ends that request alone.
"""

from __future__ import annotations

import logging

from quire.core.clock import Clock
from quire.core.events import Cancel, CancelSeq, Command, FinishReason, SeqDelta
from quire.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.core.request import Request
from quire.core.result import TokenLogprobs
from quire.core.sampling import OutputKind
from quire.text.output import TextStream
from quire.text.tokenizer import HfTokenizer

logger = logging.getLogger("quire.engine")

OUTPUT_FAILED = "output_failed: the engine's tokens could not be turned into output; see its log"


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
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.pooled: list[float] | None = None
        self._tokenizer = tokenizer
        self._clock = clock
        self._n_open = params.n
        if params.logprobs is not None:
            for completion in self.completions:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        self._texts = (
            [TextStream(tokenizer, params) for _ in self.completions]
            if tokenizer is not None and params.detokenize
            else []
        )

    @property
    def finished(self) -> bool:
        """True once every completion has a finish reason."""
        return self._n_open == 0

    def fresh(self) -> OpenRequest:
        """The same request before its first output."""
        return OpenRequest(self.request, self.prompt, self._tokenizer, self._clock, self.request_id)

    def take(self, delta: SeqDelta, *, wants_parts: bool = True) -> tuple[list[CompletionOutput], Command | None]:
        """Apply one delta: (new parts, what the engine must be told). wants_parts False: an empty list for the parts of
        tokens, for who reads the completions at the end.

        Parts are empty if the completion had ended already. The engine is told when a stop string ended a sequence,
        and when this delta could not be turned into output, which ends the whole request with an error.
        """
        try:
            return self._take(delta, wants_parts)
        except Exception:
            logger.exception("request %s: its output failed", self.request.request_id)
            return self.end(FinishReason.ERROR, OUTPUT_FAILED), Cancel([self.request.request_id])

    def end(self, reason: FinishReason, stop_reason: str | None = None) -> list[CompletionOutput]:
        """Finish every open completion without the engine; returns their last parts. Text held back is lost."""
        parts = []
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason, completion.stop_reason = reason.value, stop_reason
                parts.append(_part(completion, "", [], None if completion.logprobs is None else []))
        self._n_open = 0
        self.metrics.finished_s = self._clock.now_s()
        return parts

    def _take(self, delta: SeqDelta, wants_parts: bool) -> tuple[list[CompletionOutput], Command | None]:
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
                self.prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        text, logprobs = self._advance(completion, delta)
        parts = [_part(completion, text, delta.token_ids, logprobs)] if wants_parts else []
        if completion.finish_reason is None:
            return parts, None
        self._n_open -= 1
        if self.finished:
            self.metrics.finished_s = now_s
        stopped_here = isinstance(completion.stop_reason, str) and delta.finish_reason is None
        return parts, CancelSeq(delta.request_id, delta.index) if stopped_here else None

    def _advance(self, completion: CompletionOutput, delta: SeqDelta) -> tuple[str, list[dict[int, Logprob]] | None]:
        """Apply the delta to its completion; returns its text and logprobs."""
        reason = delta.finish_reason.value if delta.finish_reason is not None else None
        stop_reason: int | str | None = delta.error if delta.finish_reason is FinishReason.ERROR else delta.stop_token
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
            logprobs = [self._logprobs(row, token) for row, token in zip(delta.logprobs, delta.token_ids, strict=True)]
            completion.logprobs += logprobs
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
                row.chosen for row in delta.logprobs
            )
        completion.text += text
        completion.token_ids += delta.token_ids
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        return text, logprobs

    def output(self, parts: list[CompletionOutput]) -> RequestOutput | None:
        """What the user gets for these new parts, by `params.output_kind`; None if nothing is to be shown yet."""
        kind = self.request.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        if kind is not OutputKind.DELTA:
            parts = self.completions
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=parts,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            pooled=self.pooled,
            num_cached_tokens=self.n_cached,
            metrics=self.metrics,
        )

    def _logprobs(self, row: TokenLogprobs, token: int) -> dict[int, Logprob]:
        found = {token: Logprob(row.chosen, row.rank, self._name(token))}
        for rank, (top, value) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
            if top != token:
                found[top] = Logprob(value, rank, self._name(top))
        return found

    def _prompt_logprobs(self, rows: list[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        tokens = self.request.prompt_token_ids[1:]
        return [None, *(self._logprobs(row, token) for row, token in zip(rows, tokens, strict=True))]

    def _name(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)


def _part(
    completion: CompletionOutput, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None
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
    )


class PartBuffer:
    """New parts of a request's completions while nobody reads; those of one completion are joined."""

    def __init__(self) -> None:
        self._parts: dict[int, CompletionOutput] = {}

    def put(self, part: CompletionOutput) -> None:
        """Add the next part of a completion."""
        waiting = self._parts.get(part.index)
        if waiting is not None:
            part.text = waiting.text + part.text
            part.token_ids = waiting.token_ids + part.token_ids
            if part.logprobs is not None:
                part.logprobs = (waiting.logprobs or []) + part.logprobs
        self._parts[part.index] = part

    def take(self) -> list[CompletionOutput]:
        """Everything since the last call, in order of first arrival."""
        parts, self._parts = self._parts, {}
        return list(parts.values())
