"""Where a model's reasoning begins, and the constraint that bounds it.

Owns what a prompt and a chat template say of it. Does not own the count (`text/leading`) nor how the text is read
(`text/reasoning`). Invariant: where a mark is a token of its own, its mere characters are somebody's text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from quire.core.errors import InvalidParameter
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.text.reasoning import BEGIN, END, SPACE
from quire.text.tokenizer import HfTokenizer

TAIL_TOKENS: Final = 32
"""Last tokens of a prompt, in which it is seen whether the model begins inside its reasoning."""
FIELD: Final = "thinking_token_budget"


def has_marks(sources: Iterable[str]) -> bool:
    """Whether one of a model's chat templates knows reasoning."""
    return any(BEGIN in source and END in source for source in sources)


def ends_with(mark: str, prompt: list[int], tokenizer: HfTokenizer) -> bool:
    """Whether a prompt ends with a mark, but for white space."""
    tail, token_id = prompt[-TAIL_TOKENS:], tokenizer.token_id(mark)
    if token_id in tail:
        after = tail[len(tail) - tail[::-1].index(token_id) :]
        return not tokenizer.decode(after, skip_special_tokens=False).strip(SPACE)
    return token_id is None and tokenizer.decode(tail, skip_special_tokens=False).rstrip(SPACE).endswith(mark)


def after_thinking(
    constraint: StructuredOutputsParams | None, *, is_inside: bool, budget: int | None
) -> StructuredOutputsParams:
    """A constraint of what follows the reasoning, None for none; the reasoning has `budget` tokens at most.

    is_inside: the text begins with reasoning; else it does so only if it begins with the mark.
    """
    return msgspec.structs.replace(
        constraint or StructuredOutputsParams(),
        begins_after=END,
        begins_within=budget,
        may_begin_with=None if is_inside else BEGIN,
    )


def ends_by_control_token(tokenizer: HfTokenizer) -> bool:
    """Whether reasoning ends with a control token, which no text may write."""
    return tokenizer.token_id(END) in tokenizer.special_ids


def with_budget(
    params: SamplingParams, prompt: list[int], tokenizer: HfTokenizer | None, *, thinks: bool
) -> SamplingParams:
    """`params` with its budget of reasoning as a constraint, for this prompt. thinks: the model's template knows it.

    Where the prompt has switched reasoning off there is nothing to bound. InvalidParameter for a model that does not
    reason, or ends its reasoning in a way that cannot be enforced.
    """
    budget = params.thinking_token_budget
    if budget is None:
        return params
    if tokenizer is None:
        raise InvalidParameter(FIELD, budget, "left out, as this engine was started without a tokenizer")
    is_inside = ends_with(BEGIN, prompt, tokenizer)
    if not is_inside and not thinks:
        raise InvalidParameter(
            FIELD, budget, f"left out with this model, whose chat template has no {BEGIN} and {END}", "Use max_tokens."
        )
    if ends_by_control_token(tokenizer):
        raise InvalidParameter(FIELD, budget, f"left out with this model, whose {END} is a control token")
    shape = params.structured_outputs
    if shape is not None and (shape.begins_after, shape.begins_within, shape.may_begin_with) != (None, None, None):
        raise InvalidParameter(FIELD, budget, "left out where structured_outputs says itself where it begins")
    if ends_with(END, prompt, tokenizer):
        return msgspec.structs.replace(params, thinking_token_budget=None)
    bounded = after_thinking(shape, is_inside=is_inside, budget=budget)
    return msgspec.structs.replace(params, thinking_token_budget=None, structured_outputs=bounded)
