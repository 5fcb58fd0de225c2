"""From the finished output of a beam search to what `LLM.beam_search` returns: vLLM's shapes.

Owns that translation alone. Invariant: a search that failed raises; it is never returned as one with fewer beams.
"""

from __future__ import annotations

from quire.core.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.core.errors import EngineError, error_of
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.text.tokenizer import HfTokenizer


def beam_output(output: RequestOutput, tokenizer: HfTokenizer | None, params: BeamSearchParams) -> BeamSearchOutput:
    """The beams of one prompt. EngineError if the search failed."""
    return BeamSearchOutput([_sequence(output, one, tokenizer, params) for one in output.outputs])


def _sequence(
    output: RequestOutput, one: CompletionOutput, tokenizer: HfTokenizer | None, params: BeamSearchParams
) -> BeamSearchSequence:
    if one.failure is not None:
        raise error_of(one.failure)
    if one.finish_reason not in ("stop", "length"):
        raise EngineError(f"a beam search ended with {one.finish_reason!r}")
    is_hidden = one.finish_reason == "stop" and not params.include_stop_str_in_output
    tokens = output.prompt_token_ids + (one.token_ids[:-1] if is_hidden else one.token_ids)
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=[] if one.logprobs is None else one.logprobs,
        cum_logprob=one.cumulative_logprob or 0.0,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason=one.finish_reason,
        stop_reason=one.stop_reason,
    )
