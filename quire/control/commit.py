"""What a step's result means: tokens appended, sequences ended, pages left to the tree; one delta a sequence.

Owns stopping at token level (end tokens, stop tokens, length) and the reading of results. Faults are `faults.py`.
Invariants: a result that does not fit its plan changes nothing; a delta is handed over before its sequence ends, so
that no end is lost; spans of sequences that ended meanwhile are ignored; a preempted sequence still takes the token
that was in flight.
"""

from __future__ import annotations

import itertools
import operator

import msgspec

from quire.control.live_seqs import LiveSeqs
from quire.control.plan_builder import PlanBuilder
from quire.control.seq import InvariantError, Seq, SeqState
from quire.core.errors import EngineError
from quire.core.events import FinishReason, SeqDelta
from quire.core.logprobs import PackedLogprobs, TokenLogprobs
from quire.core.request import Pooling
from quire.core.result import StepResult

_wants_more = operator.attrgetter("wants_more")


def commit_step(live: LiveSeqs, builder: PlanBuilder, result: StepResult, deltas: list[SeqDelta]) -> None:
    """Advance every sequence of the step; appends to `deltas` in span order. The result must have passed `verify`."""
    n_plain = 0  # spans from the first on that are decodes and bring a token each, at most with its logprobs
    if not (builder.n_drafting or result.prompt_logprobs or result.pooled or result.faults):
        n_plain = len(builder.seqs) - builder.n_chunks
        _commit_decodes(live, builder, n_plain, result, deltas)
        if not builder.n_chunks:
            return
    spans, step = builder.plan.spans, builder.step
    row, token_at, n_verifying = n_plain, n_plain, 0
    foretold = {span for span, *_ in builder.plan.foretold}
    n_new, tokens, logprobs, all_prompt_rows = result.n_new, result.tokens, result.logprobs, result.prompt_logprobs
    columns = zip(builder.seqs, spans.starts, spans.lengths, spans.wants, spans.n_drafts, strict=True)
    for i, (seq, start, length, wants, n_drafts) in enumerate(itertools.islice(columns, n_plain, None), n_plain):
        count = 0
        if wants:
            count = n_new[row]
            row += 1
        if n_drafts:
            n_verified, n_verifying = result.n_drafted[n_verifying], n_verifying + 1
            if count and step > seq.ignore_through:
                n_seqs, is_sure = len(builder.seqs), i in foretold
                live.drafts.count(seq, step, n_drafts, n_verified, count - 1, n_seqs, is_sure=is_sure)
        if step > seq.ignore_through:
            if seq.slot >= 0:  # else it was preempted: its lengths start again, its token stays valid
                end = start + length
                if seq.computed == start and not n_drafts and end <= seq.planned:
                    seq.computed = end  # most spans
                else:
                    seq.advance(start, length, n_drafts and n_drafts + 1 - count)
                if seq.request.pooling is not None:
                    _pool(live, seq, result.pooled.get(i), deltas)
            if all_prompt_rows and i in all_prompt_rows:
                _keep_prompt_rows(seq, start, all_prompt_rows[i])
            if wants:
                if not count:
                    raise InvariantError(f"a faulted sequence goes on in step {step}")
                if logprobs and seq.search is not None:  # a beam always brings some
                    _report(live, seq, tokens[token_at], logprobs[token_at], deltas)
                elif count == 1:
                    _append_token(live, seq, tokens[token_at], logprobs.get(token_at) if logprobs else None, deltas)
                else:
                    rows = [logprobs.get(i) for i in range(token_at, token_at + count)]
                    _append_tokens(live, seq, tokens[token_at : token_at + count], rows, deltas)
            if seq.computed >= seq.returns_at:  # never of one that has left: its next turn may begin before its drafts
                live.caches[seq.dp_rank].give_back(seq)
        token_at += count


def _commit_decodes(live: LiveSeqs, builder: PlanBuilder, n: int, result: StepResult, deltas: list[SeqDelta]) -> None:
    """The same of the first `n` spans, which have a token each and bring at most its logprobs: all of them in most
    steps."""
    step, gives_back = builder.step, live.cache.has_windows
    rows = map(result.logprobs.get, range(n)) if result.logprobs else itertools.repeat(None)
    columns = zip(builder.seqs[:n], builder.plan.spans.starts, result.tokens, rows, strict=False)
    for seq, start, token, row in columns:
        if step <= seq.ignore_through:
            continue
        if seq.slot >= 0:
            if seq.computed == start < seq.planned:
                seq.computed = start + 1
            else:
                seq.advance(start, 1, 0)
        known = seq.tokens
        n_known = len(known)
        if row is not None and seq.search is not None:
            _report(live, seq, token, row, deltas)
        elif n_known >= seq.limit or n_known == seq.prompt_len or token in seq.stop_ids:
            _append_token(live, seq, token, row, deltas)
        elif row is not None and seq.wants_more:
            known.append(token)
            deltas.append(SeqDelta(seq.request.request_id, seq.index, [token], logprobs=row))
        else:
            known.append(token)
            deltas.append(SeqDelta(seq.request.request_id, seq.index, [token]))
        if gives_back and seq.computed >= seq.returns_at:
            live.caches[seq.dp_rank].give_back(seq)


def verify(builder: PlanBuilder, result: StepResult) -> None:
    """EngineError unless the result answers every span of its plan; nothing has changed then."""
    spans, step = builder.plan.spans, builder.step
    if _is_plain(builder, result):
        return
    faulted = {fault.slot for fault in result.faults}
    if not faulted.issubset(spans.slots):
        raise EngineError(f"step {step} reports faults of slots {sorted(faulted)}, it has spans of {spans.slots}")
    if len(result.n_new) != sum(spans.wants) or len(result.tokens) != sum(result.n_new):
        raise EngineError(
            f"the result of step {step} has {len(result.tokens)} tokens in {len(result.n_new)} counts, "
            f"the plan wanted {sum(spans.wants)}"
        )
    n_verified = dict(zip([i for i, n in enumerate(spans.n_drafts) if n], result.n_drafted, strict=False))
    if len(result.n_drafted) != len(spans.n_drafts) - spans.n_drafts.count(0):
        raise EngineError(f"step {step} reports drafts of {len(result.n_drafted)} spans, it planned {spans.n_drafts}")
    row = token_at = 0
    columns = zip(builder.seqs, spans.slots, spans.wants, spans.n_drafts, strict=True)
    for i, (seq, slot, wants, n_drafts) in enumerate(columns):
        is_live = step > seq.ignore_through
        if wants:
            count = result.n_new[row]
            row += 1
            most = 1 + n_verified.get(i, 0)
            if not (count == 0 if slot in faulted else 1 <= count <= most) or most > 1 + n_drafts:
                wanted = f"1 to {most} of {1 + n_drafts}" if n_drafts else "one"
                raise EngineError(
                    f"step {step} brought {count} tokens for slot {slot}: {wanted}, or a fault, was expected"
                )
            asked = range(token_at, token_at + count) if is_live and seq.params.logprobs >= 0 else ()
            if any(at not in result.logprobs for at in asked):
                raise EngineError(f"step {step} brought a token without the logprobs that its request asked for")
            token_at += count
        if (
            is_live
            and slot not in faulted
            and (i in result.pooled) != _wants_states(seq, spans.starts[i] + spans.lengths[i])
        ):
            raise EngineError(
                f"step {step} did not bring what slot {slot} gives to the vector of its prompt, and no more"
            )
        if is_live and i in result.prompt_logprobs:
            n_rows, start = len(result.prompt_logprobs[i]), spans.starts[i]
            if seq.prompt_rows is None or start + n_rows > len(seq.prompt_rows):
                raise EngineError(f"step {step} brought {n_rows} prompt logprobs at {start} that nobody asked for")


def _is_plain(builder: PlanBuilder, result: StepResult) -> bool:
    """Whether a result is one token for each span that wanted one, and nobody asked for more, or all for the logprobs
    that they got: most results."""
    more = result.faults or result.prompt_logprobs or result.pooled or result.n_drafted
    n = len(result.n_new)
    if builder.n_drafting or more or n != len(result.tokens) or result.n_new.count(1) != n:
        return False
    if n != builder.plan.spans.wants.count(True):
        return False
    if result.logprobs:
        return result.logprobs.keys() == set(range(n)) and not any(seq.request.pooling for seq in builder.seqs)
    return not any(map(_wants_more, builder.seqs))


def _wants_states(seq: Seq, end: int) -> bool:
    """Whether a span that ends at `end` gives something to the vector of its prompt."""
    pooling = seq.request.pooling
    return pooling is Pooling.MEAN or (pooling is Pooling.LAST and end == seq.prompt_len)


def _pool(live: LiveSeqs, seq: Seq, states: list[float] | None, deltas: list[SeqDelta]) -> None:
    """Add what a span gave to the vector of its prompt; the end if it was the last of the prompt."""
    if states is not None:
        seq.pooled = [a + b for a, b in zip(seq.pooled, states, strict=True)] if seq.pooled else states
    if seq.computed < seq.prompt_len:
        return
    is_mean = seq.request.pooling is Pooling.MEAN
    vector = [value / seq.prompt_len for value in seq.pooled] if is_mean else seq.pooled
    delta = SeqDelta(seq.request.request_id, seq.index, [], FinishReason.STOP, pooled=vector)
    delta.n_cached, delta.queued_s = seq.first_cached, seq.queued_s
    deltas.append(delta)
    live.end(seq, FinishReason.STOP)


def _report(live: LiveSeqs, seq: Seq, token: int, row: PackedLogprobs, deltas: list[SeqDelta]) -> None:
    """What can follow a beam is known; all hypotheses, if that was the last thing that their search waited for."""
    search = seq.search
    if search is not None and search.report(seq, token, row.rows()[0]):
        found = search.deltas()
        deltas += found
        live.end(seq, found[0].finish_reason or FinishReason.STOP)


def _append_tokens(
    live: LiveSeqs, seq: Seq, tokens: list[int], rows: list[PackedLogprobs | None], deltas: list[SeqDelta]
) -> None:
    """A token and the drafts behind it that were kept, in one delta, or each in its own where text may end the
    sequence before the last of them; those behind the sequence's end do not count."""
    first, may_stop = len(deltas), bool(seq.request.params.stop)
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if place:
            seq.n_drafts_kept += 1  # before its end, at which it is told
        _append_token(live, seq, token, row if may_stop else None, deltas)
        if seq.state is SeqState.ENDED:
            break
    if may_stop:
        return
    delta, *later = deltas[first:]
    for one in later:
        delta.token_ids += one.token_ids
        delta.stop_token, delta.finish_reason = one.stop_token, one.finish_reason
    if seq.params.logprobs >= 0:
        delta.logprobs = PackedLogprobs.join([row for row in rows[: len(delta.token_ids)] if row is not None])
    del deltas[first + 1 :]


def _append_token(live: LiveSeqs, seq: Seq, token: int, row: PackedLogprobs | None, deltas: list[SeqDelta]) -> None:
    """One more output token, and the end if it is the last."""
    known = seq.tokens
    known.append(token)
    delta = SeqDelta(seq.request.request_id, seq.index, [token])
    if row is not None and seq.params.logprobs >= 0:
        delta.logprobs = row
    n_outputs = len(known) - seq.prompt_len
    if n_outputs == 1:
        _complete_first(seq, delta)
    if token in seq.stop_ids and n_outputs > seq.min_tokens:
        delta.stop_token = token
        delta.finish_reason = FinishReason.STOP
    elif len(known) > seq.limit:
        delta.finish_reason = FinishReason.LENGTH
    deltas.append(delta)
    if delta.finish_reason is not None:
        live.end(seq, delta.finish_reason)


def _complete_first(seq: Seq, delta: SeqDelta) -> None:
    """What only the first delta of a sequence carries."""
    delta.n_cached, delta.queued_s = seq.first_cached, seq.queued_s
    if seq.prompt_rows is not None:
        rows = [row for row in seq.prompt_rows if row is not None]
        if len(rows) != seq.prompt_len - 1:
            raise EngineError(f"{len(rows)} of {seq.prompt_len - 1} prompt logprobs came before the first token")
        delta.prompt_logprobs = PackedLogprobs.of(rows)
        seq.prompt_rows = None
        seq.params = msgspec.structs.replace(seq.params, prompt_logprobs=-1)


def _keep_prompt_rows(seq: Seq, start: int, rows: list[TokenLogprobs]) -> None:
    """Rows of the tokens at start+1, start+2, ... of the prompt."""
    if seq.prompt_rows is not None:
        seq.prompt_rows[start : start + len(rows)] = rows
