"""`SlotParams` from a `Request`: the token-level sampling parameters that compute keeps for a slot."""

from __future__ import annotations

from quire.core.plan import SlotParams
from quire.core.request import Request
from quire.core.sampling import MAX_SEED


def slot_params(request: Request, index: int) -> SlotParams:
    """Parameters of sequence `index`: seed + index; prompt logprobs for sequence 0 only (they are the same for all)."""
    params = request.params
    end_ids = sorted({*request.end_token_ids, *params.stop_token_ids})
    wants_prompt = params.prompt_logprobs is not None and index == 0 and len(request.prompt_token_ids) > 1
    return SlotParams(
        temperature=0.0 if params.greedy or request.beams is not None else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=(request.seed + index) % (MAX_SEED + 1),
        logprobs=_n_logprobs(request),
        prompt_logprobs=params.prompt_logprobs if wants_prompt and params.prompt_logprobs is not None else -1,
        logit_bias=dict(params.logit_bias or {}),
        allowed_token_ids=params.allowed_token_ids,
        bad_token_seqs=request.bad_token_seqs,
        masked_end_ids=end_ids if params.min_tokens > 0 else [],
        masked_until=len(request.prompt_token_ids) + params.min_tokens,
        pooling=request.pooling,
        deterministic=params.deterministic,
    )


def _n_logprobs(request: Request) -> int:
    """The candidates of a beam are its most probable tokens."""
    n = -1 if request.params.logprobs is None else request.params.logprobs
    if request.beams is not None:
        return max(n, request.beams.n_candidates(len(set(request.end_token_ids))))
    return n
