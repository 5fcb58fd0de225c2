"""A budget of reasoning becomes a constraint of its prompt, or is refused by name."""

from __future__ import annotations

import pytest
from small_tokenizers import byte_level
from tokenizers import AddedToken

from quire.core.errors import InvalidParameter
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.text.thinking import has_marks, with_budget
from quire.text.tokenizer import HfTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return HfTokenizer(byte_level(), {"type": "ByteLevel"}, {"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("prompt", "thinks", "begin"),
    [("user: hi\n<think>\n", True, None), ("user: hi\n<think>\n", False, None), ("user: hi\n", True, "<think>")],
)
def test_a_budget_is_a_constraint(tokenizer: HfTokenizer, prompt: str, thinks: bool, begin: str | None) -> None:
    """Where the prompt opens the reasoning the model thinks, whatever its template."""
    for shape in (None, StructuredOutputsParams(choice=["yes", "no"])):
        params = SamplingParams(temperature=0.5, thinking_token_budget=6, structured_outputs=shape)
        made = with_budget(params, tokenizer.encode(prompt), tokenizer, thinks=thinks)
        constraint = made.structured_outputs
        assert constraint is not None and made.thinking_token_budget is None and made.temperature == 0.5
        found = (constraint.begins_after, constraint.begins_within, constraint.may_begin_with, constraint.choice)
        assert found == ("</think>", 6, begin, None if shape is None else shape.choice)
        assert (params.thinking_token_budget, params.structured_outputs) == (6, shape), "the caller's own stay"
        made.verify(len(tokenizer))


def test_nothing_is_bound_where_the_prompt_has_switched_reasoning_off(tokenizer: HfTokenizer) -> None:
    shape = StructuredOutputsParams(choice=["yes"])
    params = SamplingParams(thinking_token_budget=6, structured_outputs=shape)
    made = with_budget(params, tokenizer.encode("hi<think>\n\n</think>\n\n"), tokenizer, thinks=True)
    assert (made.thinking_token_budget, made.structured_outputs) == (None, shape)
    plain = SamplingParams()
    assert with_budget(plain, [1], None, thinks=False) is plain


def test_who_cannot_honour_it_says_so(tokenizer: HfTokenizer) -> None:
    prompt = tokenizer.encode("hi")
    own = StructuredOutputsParams(choice=["yes"], begins_after="so:")
    for params, given, thinks, message in (
        (SamplingParams(thinking_token_budget=6), tokenizer, False, "whose chat template has no <think> and </think>"),
        (SamplingParams(thinking_token_budget=6), None, True, "without a tokenizer"),
        (SamplingParams(thinking_token_budget=6, structured_outputs=own), tokenizer, True, "where structured_outputs"),
    ):
        with pytest.raises(InvalidParameter, match=message) as caught:
            with_budget(params, prompt, given, thinks=thinks)
        assert caught.value.param == "thinking_token_budget"
    with pytest.raises(InvalidParameter, match=r"ignore_eos = True .* False with thinking_token_budget"):
        SamplingParams(thinking_token_budget=6, ignore_eos=True)


def test_a_control_token_ends_no_reasoning_by_force() -> None:
    made = byte_level()
    made.add_special_tokens([AddedToken("</think>", special=True)])
    tokenizer = HfTokenizer(made, {"type": "ByteLevel"}, {"eos_token": "</s>"})
    with pytest.raises(InvalidParameter, match="whose </think> is a control token"):
        with_budget(SamplingParams(thinking_token_budget=6), tokenizer.encode("hi"), tokenizer, thinks=True)


def test_a_template_with_both_marks_knows_reasoning() -> None:
    assert has_marks(["{{ x }}", "<think>{{ x }}</think>"])
    assert not has_marks(["<think>", "</think>"]) and not has_marks([])
