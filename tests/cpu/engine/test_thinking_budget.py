"""`SamplingParams(thinking_token_budget=...)` of a Python user, through a whole CPU engine on the demo model."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.core.errors import InvalidParameter

TALK = [{"role": "user", "content": "Add two numbers."}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "<think>\n{% if enable_thinking is false %}</think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = pathlib.Path(tmp_path_factory.mktemp("template")) / "template.jinja"
    path.write_text(TEMPLATE)
    llm = LLM(device="cpu", num_threads=1, max_num_seqs=8, max_model_len=512, chat_template=str(path))
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_chat_ends_its_reasoning_at_the_budget(thinker: LLM, budget: int) -> None:
    free = SamplingParams(temperature=0, max_tokens=40)
    bound = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=budget)
    (unbound,), (one,) = (thinker.chat(TALK, params, use_tqdm=False) for params in (free, bound))
    assert "</think>" not in unbound.outputs[0].text
    thought, mark, _ = one.outputs[0].text.partition("</think>")
    assert mark and len(thinker.tokenizer.encode(thought) if thought else []) <= budget + 1
    assert unbound.outputs[0].text.startswith(thought)
    assert bound.thinking_token_budget == budget and bound.structured_outputs is None


def test_what_follows_without_a_constraint_is_free(thinker: LLM) -> None:
    """Alone, and beside a neighbour that is followed to its end."""
    params = SamplingParams(temperature=1.0, seed=3, min_tokens=30, max_tokens=40, thinking_token_budget=2)
    beside = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(regex="[a-z ]+!"))
    (alone,) = thinker.chat(TALK, params, use_tqdm=False)
    one, _ = thinker.chat([TALK, TALK], [params, beside], use_tqdm=False)
    assert alone.outputs[0].token_ids == one.outputs[0].token_ids
    rest = thinker.tokenizer.encode(alone.outputs[0].text.partition("</think>")[2])
    assert len(rest) > 20 and max(rest) > 300


def test_what_follows_fits_the_constraint(thinker: LLM) -> None:
    shape = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=3, structured_outputs=shape)
    text = thinker.chat(TALK, params, use_tqdm=False)[0].outputs[0].text
    assert text.partition("</think>")[2].strip() in ("yes", "no")


def test_a_stream_is_bound_too(thinker: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, thinking_token_budget=2)
    text = "".join(part.outputs[0].text for part in thinker.stream(thinker.render_chat(TALK), params))
    assert text == thinker.chat(TALK, params, use_tqdm=False)[0].outputs[0].text and "</think>" in text


def test_where_reasoning_is_off_nothing_changes(thinker: LLM) -> None:
    off = {"enable_thinking": False}
    made = [
        thinker.chat(TALK, SamplingParams(temperature=0, max_tokens=12, thinking_token_budget=budget), use_tqdm=False,
                     chat_template_kwargs=off)[0].outputs[0].token_ids
        for budget in (None, 1)
    ]  # fmt: skip
    assert made[0] == made[1]


def test_a_model_that_does_not_think_refuses_it() -> None:
    llm = LLM(device="cpu", num_threads=1, max_num_seqs=1, max_model_len=64)
    try:
        with pytest.raises(InvalidParameter, match=r"thinking_token_budget = 4 .* Use max_tokens"):
            llm.chat(TALK, SamplingParams(thinking_token_budget=4, max_tokens=4), use_tqdm=False)
    finally:
        llm.shutdown()
