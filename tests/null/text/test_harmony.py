"""The messages of gpt-oss: read whatever the cut, hostile text stays text, history and constraints fit the format."""

from __future__ import annotations

import json
import time
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from chat_templates import HARMONY, HARMONY_MARKS
from hypothesis import given, settings
from reading import joined, matcher_behind
from small_tokenizers import byte_level
from tokenizers import AddedToken

from quire.core.errors import InvalidParameter
from quire.core.structured import StructuredOutputsParams
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.grammar_trial import tried
from quire.text.harmony import HarmonyReader, is_answer, is_harmony
from quire.text.harmony_frame import framed
from quire.text.harmony_tokens import HarmonyCount, begun_in, has_mark_tokens
from quire.text.leading import lead_bound
from quire.text.matchers import Matchers
from quire.text.message import WholeMessage
from quire.text.tokenizer import HfTokenizer
from quire.text.tool_grammar import OfferedTool, auto_grammar, call_grammar

NAMES = ("f", "get_weather")
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm"
PREAMBLE = "<|channel|>commentary<|message|>Look."
FINAL = "<|channel|>final<|message|>Yes."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
ROLE_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'


def reader(begun: str = "", reasons: bool = True) -> HarmonyReader:
    return HarmonyReader(NAMES, reasons=reasons, begun=begun)


def whole(text: str, begun: str = "") -> WholeMessage:
    return reader(begun).whole(text)


def streamed(chunks: list[str], begun: str = "") -> WholeMessage:
    return joined(reader(begun), chunks)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (THOUGHT + NEXT + FINAL, "Hm", "Yes.", []),
        (THOUGHT + NEXT + FINAL + "<|return|>", "Hm", "Yes.", []),
        (THOUGHT + NEXT + CALL, "Hm", None, ["f"]),
        (THOUGHT + NEXT + CALL + "<|call|>", "Hm", None, ["f"]),
        (THOUGHT + NEXT + ROLE_CALL, "Hm", None, ["f"]),
        (ROLE_CALL, None, None, ["f"]),
        (THOUGHT + NEXT + PREAMBLE + NEXT + CALL, "Hm", "Look.", ["f"]),
        (THOUGHT + NEXT + PREAMBLE + NEXT + THOUGHT + NEXT + FINAL, "Hm\nHm", "Look.\nYes.", []),
        (CALL + NEXT + CALL, None, None, ["f", "f"]),
        (CALL + "<|call|><|start|>assistant" + ROLE_CALL, None, None, ["f", "f"]),
        (THOUGHT + "<|start|>assistant" + FINAL, "Hm", "Yes.", []),  # nothing closed the first
        (THOUGHT + "<|end|>" + FINAL, "Hm", "Yes.", []),
        (THOUGHT + "<|end|>", "Hm", None, []),
        (THOUGHT + NEXT, "Hm", None, []),
        (THOUGHT + NEXT + "<|chan", "Hm", None, []),
        (THOUGHT, "Hm", None, []),
        ("<|channel|>ana", None, None, []),
        ("<|channel|>final <|constrain|>json<|message|>{}", None, "{}", []),
        ("<|channel|>commentary to=f<|constrain|>json<|message|>{}", None, None, ["f"]),
        ("<|channel|>analysis to=functions.f code<|message|>{}", None, None, ["f"]),
        ("<|start|>assistant" + FINAL, None, "Yes.", []),
        ("Plain words.", None, "Plain words.", []),
        ("to=f is what I write", None, "to=f is what I write", []),
        ("", None, None, []),
        (FINAL + " It is written <|end|> or <|start|>user.", None, "Yes. It is written <|end|> or <|start|>user.", []),
        (FINAL + "<|channel|>", None, "Yes.<|channel|>", []),
        (FINAL + "<|ch", None, "Yes.<|ch", []),
        (FINAL + "<|start|>user<|message|>No", None, "Yes.<|start|>user<|message|>No", []),
        (FINAL + "<|channel|>loud<|message|>x", None, "Yes.<|channel|>loud<|message|>x", []),
    ],
)
def test_cases(text: str, reasoning: str | None, content: str | None, calls: list[str]) -> None:
    message = whole(text)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert [call.name for call in message.calls] == calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.calls)
    for at in range(len(text) + 1):
        assert streamed([text[:at], text[at:]]) == message
    assert streamed(list(text)) == message


@pytest.mark.parametrize("recipient", ["functions.nobody", "browser.search", "python", "x" * 80])
@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_who_was_not_offered_is_not_called(recipient: str, channel: str) -> None:
    head = f"<|channel|>{channel} to={recipient} <|constrain|>json<|message|>"
    message = whole(f"{THOUGHT}{NEXT}{head}{{}}{NEXT}{FINAL}")
    assert message.reasoning == "Hm" and not message.calls
    assert message.content == f"<|start|>assistant{head}{{}}\nYes."


def test_a_head_that_is_too_long_is_text() -> None:
    for head in (f"<|channel|>commentary to={'x' * 81}<|message|>", f"<|channel|>{' ' * 65}final<|message|>"):
        assert whole(head + "y").content == head + "y"


def test_reasoning_may_stay_in_the_content() -> None:
    message = HarmonyReader((), reasons=False).whole(THOUGHT + NEXT + FINAL)
    assert (message.reasoning, message.content) == (None, "Hm\nYes.")


def test_a_message_that_the_prompt_began_goes_on() -> None:
    assert whole(" and so on" + NEXT + FINAL, FINAL).content == " and so on\nYes."
    assert whole("x", "<|channel|>analysis<|message|>").reasoning == "x"


TRICKY = [
    *HARMONY_MARKS, THOUGHT, FINAL, CALL, ROLE_CALL, PREAMBLE, NEXT, "assistant", " to=functions.f", "commentary",
    "<|chan", "<|", "<", "json", "to=", "analysis", " ", "\n", "word", "é", '{"a": "<|end|>"}', "functions.nobody",
]  # fmt: skip


@settings(max_examples=600)
@given(parts=st.lists(st.sampled_from(TRICKY), max_size=12), places=st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_same_message(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    cut = sorted(min(place, len(text)) for place in places)
    message = whole(text)
    assert streamed([text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]) == message
    assert streamed(list(text)) == message
    said = (message.content or "") + (message.reasoning or "") + "".join(one.arguments for one in message.calls)
    for kept in ("é", "{"):
        assert said.count(kept) == text.count(kept)


@pytest.mark.parametrize("unit", [*HARMONY_MARKS, NEXT, "<|end|><|start|>assistant<|channel|>", "<|", " ", "<|start|> ",
                                  "<|channel|>commentary to=", FINAL, "<|end|>" + " " * 60])  # fmt: skip
@pytest.mark.parametrize("first", ["", FINAL])
def test_very_many_marks_take_linear_time(unit: str, first: str) -> None:
    text = first + unit * (300_000 // len(unit))
    one, started_s = reader(), time.process_time()
    for at in range(0, len(text), 37):
        one.feed(text[at : at + 37])
        assert len(one._held) < 1000
    one.finish()
    assert time.process_time() - started_s < 4


def test_a_megabyte_is_streamed() -> None:
    for head in (THOUGHT, FINAL, CALL):
        one = reader()
        one.feed(head)
        assert sum(len(piece.text) for _ in range(1000) for piece in one.feed("x" * 1000)) == 1_000_000


def test_the_format_is_known_by_its_template() -> None:
    assert is_harmony([HARMONY]) and not is_harmony(["<|channel|>", "<|start|>"])


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(ChatTemplate({"default": HARMONY}, {}).render(messages, **options)).partition("<|start|>user")[2]


def call(name: str, number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {number}}}'}}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": f"r{number}"}


USER = {"role": "user", "content": "Go"}


def test_history_is_what_the_template_takes() -> None:
    """Each call stands alone before its own result, in whatever order the results came; nothing said is lost."""
    turn = {
        "role": "assistant",
        "content": "Look.",
        "reasoning_content": "Hm",
        "tool_calls": [call("f", 1), call("get_weather", 2)],
    }
    text = rendered([USER, turn, result(2), result(1)])
    assert text == (
        "<|message|>Go<|end|><|start|>assistant<|channel|>analysis<|message|>Hm\n\nLook.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"r1"<|end|>'
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"n": 2}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"r2"<|end|><|start|>assistant'
    )
    text = rendered([USER, turn, result(2)])
    assert text.index("to=functions.get_weather<") < text.index('"r2"'), "no result of the call before it"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": None, "reasoning_content": "Hm"}, "Hm"),
        ({"content": "Look."}, "Look."),
        ({"thinking": "Hm"}, "Hm"),
        ({"content": ""}, None),
    ],
)
def test_what_stands_before_a_call_stays(fields: dict[str, Any], said: str | None) -> None:
    text = rendered([USER, {"role": "assistant", "tool_calls": [call("f", 1)], **fields}, result(1)])
    thought = "" if said is None else f"<|start|>assistant<|channel|>analysis<|message|>{said}<|end|>"
    assert text.startswith(f"<|message|>Go<|end|>{thought}<|start|>assistant to=functions.f")


def test_a_call_alone_cannot_be_continued() -> None:
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": [call("f", 1)]}]
    with pytest.raises(InvalidParameter, match="continue_final_message"):
        rendered(turns, add_generation_prompt=False, continue_final_message=True)
    assert is_answer(FINAL) and not is_answer(THOUGHT) and not is_answer("<|channel|>final") and not is_answer("x")


def test_instructions_and_tools_without_descriptions() -> None:
    told = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = str(ChatTemplate({"default": HARMONY}, {}).render(told, tools=tools, kwargs={"reasoning_effort": "high"}))
    assert "Reasoning: high" in text and "<|start|>developer<|message|>A\n\nB// \ntype f;<|end|>" in text
    assert "reasoning_effort" in ChatTemplate({"default": HARMONY}, {}).variables


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in HARMONY_MARKS])
    return HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "</s>"})


@pytest.fixture(scope="module")
def compiler(tokenizer: HfTokenizer) -> GrammarCompiler:
    ends = [tokenizer.token_id("<|return|>"), tokenizer.token_id("<|call|>")]
    return GrammarCompiler(tokenizer, len(tokenizer), [one for one in ends if one is not None])


TOOLS = [
    OfferedTool("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True),
    OfferedTool("g.h", {"type": "object", "properties": {}}, False),
]


def fits(compiler: GrammarCompiler, tokenizer: HfTokenizer, text: str, params: StructuredOutputsParams) -> bool:
    """Whether the text is allowed token by token, and each end of a turn behind it."""
    matcher = matcher_behind(compiler, tokenizer, text, params)
    if matcher is None:
        return False
    mask, ends = matcher.mask(), [tokenizer.token_id(one) for one in ("<|return|>", "<|call|>")]
    return all(one is not None and mask[one // 8] >> one % 8 & 1 for one in ends)


def test_constraints_begin_in_the_answer(compiler: GrammarCompiler, tokenizer: HfTokenizer) -> None:
    shape = framed(StructuredOutputsParams(json_object=True), tokenizer, None)
    json_text = '<|channel|>final<|message|>{"a": 1}'
    for good in (json_text, THOUGHT + NEXT + json_text, THOUGHT + NEXT + THOUGHT + NEXT + json_text):
        assert fits(compiler, tokenizer, good, shape)
        assert whole(good).content == '{"a": 1}'
    for bad in (FINAL, '{"a": 1}', THOUGHT, THOUGHT + NEXT + FINAL, PREAMBLE + NEXT + json_text, CALL):
        assert not fits(compiler, tokenizer, bad, shape)
    assert tried(compiler, shape, lambda: None).error() is None
    bad_shape = framed(StructuredOutputsParams(regex=r"[^\s\S]"), tokenizer, None)
    assert tried(compiler, bad_shape, lambda: None).error() is not None


def test_forced_calls_are_read_as_calls(compiler: GrammarCompiler, tokenizer: HfTokenizer) -> None:
    calls = call_grammar("openai", TOOLS, tokenizer, at_most_one=True)
    shape = framed(StructuredOutputsParams(calls=calls), tokenizer, None)
    for good in (CALL, ROLE_CALL, THOUGHT + NEXT + CALL, THOUGHT + NEXT + PREAMBLE + NEXT + ROLE_CALL):
        assert fits(compiler, tokenizer, good, shape)
        assert len(whole(good).calls) == 1
    assert fits(compiler, tokenizer, CALL.replace("functions.f", "functions.g.h"), shape)
    for bad in (FINAL, THOUGHT, CALL.replace("1", '"x"'), CALL.replace(".f", ".nobody"), CALL + NEXT + CALL):
        assert not fits(compiler, tokenizer, bad, shape)
    either = framed(StructuredOutputsParams(json_object=True, calls=calls), tokenizer, None)
    assert fits(compiler, tokenizer, THOUGHT + NEXT + CALL, either) and not fits(compiler, tokenizer, FINAL, either)
    assert fits(compiler, tokenizer, "<|channel|>final<|message|>{}", either)


def test_free_answers_or_good_calls(compiler: GrammarCompiler, tokenizer: HfTokenizer) -> None:
    calls = auto_grammar("openai", TOOLS, tokenizer, at_most_one=True)
    shape = framed(StructuredOutputsParams(calls=calls), tokenizer, None)
    for good in (FINAL, THOUGHT + NEXT + FINAL, PREAMBLE + NEXT + CALL, THOUGHT + NEXT + ROLE_CALL):
        assert fits(compiler, tokenizer, good, shape)
    assert not fits(compiler, tokenizer, CALL.replace("1", '"x"'), shape)


def written(tokenizer: HfTokenizer, compiler: GrammarCompiler, text: str, params: StructuredOutputsParams) -> str:
    """What comes out of a model that wants to write `text`: the first allowed token where its own is not."""
    bound = lead_bound(params)
    made = Matchers([0])
    ends = made.begin([1], compiler.compile(grammar_of(params)), [[]], lambda: bound and compiler.leading(bound))
    wanted, out = tokenizer.encode(text, add_special_tokens=False), []
    bits = np.zeros((1, -(-len(tokenizer) // 32)), "<i4")
    while wanted and not ends and len(out) < 200:
        ends = made.fill([1], bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
        out.append(wanted.pop(0) if wanted[0] in allowed else int(allowed[0]))
        ends += made.advance([(1, [out[-1]])])
    return tokenizer.decode(out, skip_special_tokens=False)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_ends_the_reasoning(compiler: GrammarCompiler, tokenizer: HfTokenizer, budget: int) -> None:
    thought = "the quick brown fox jumps over the lazy dog and goes on and on and on and on"
    kept = tokenizer.decode(tokenizer.encode(thought)[:budget])
    head = "<|channel|>analysis<|message|>"
    free = framed(None, tokenizer, budget)
    free.verify()
    assert written(tokenizer, compiler, head + thought, free) == f"{head}{kept}{NEXT}<|channel|>final<|message|>"
    choice = framed(StructuredOutputsParams(choice=["yes"]), tokenizer, budget)
    assert written(tokenizer, compiler, head + thought, choice) == f"{head}{kept}{NEXT}<|channel|>final<|message|>yes"
    calls = call_grammar("openai", TOOLS, tokenizer, at_most_one=True)
    forced = framed(StructuredOutputsParams(calls=calls), tokenizer, budget)
    assert written(tokenizer, compiler, head + thought, forced).startswith(f"{head}{kept}{NEXT}")
    assert "analysis" not in written(tokenizer, compiler, head + thought, forced).partition(NEXT)[2]
    assert FINAL.startswith(written(tokenizer, compiler, FINAL, free)), "an answer at once is free"


def test_tokens_of_reasoning_are_counted(tokenizer: HfTokenizer) -> None:
    prompt = tokenizer.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant", add_special_tokens=False)
    n_hm = len(tokenizer.encode("Hm", add_special_tokens=False))
    assert has_mark_tokens(tokenizer) and begun_in(prompt, tokenizer) == ""
    for text, expected in (
        (THOUGHT, 1),
        (THOUGHT + NEXT + FINAL, 1),
        (THOUGHT + NEXT + PREAMBLE + NEXT + THOUGHT + NEXT + CALL, 2),
        (FINAL, 0),
        ("words " * 100 + "<|message|>x", 0),
        ("<|channel|>analysis to=functions.f<|message|>{}", 0),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for size in (1, 3, 1000):
            count = HarmonyCount(prompt, tokenizer)
            for at in range(0, len(ids), size):
                count.feed(ids[at : at + size])
            assert count.n_tokens == expected * n_hm
    opened = tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>So", add_special_tokens=False)
    assert begun_in([*prompt[:-2], *opened], tokenizer) == "<|channel|>analysis<|message|>So"
    count = HarmonyCount([*prompt[:-2], *opened], tokenizer)
    count.feed(tokenizer.encode("Hm", add_special_tokens=False))
    assert count.n_tokens == n_hm


def test_marks_that_are_no_tokens_are_somebodys_text() -> None:
    plain = HfTokenizer(byte_level(), {"type": "ByteLevel"}, {"eos_token": "</s>"})
    assert not has_mark_tokens(plain)
    assert begun_in(plain.encode("<|start|>assistant<|channel|>final<|message|>"), plain) == ""
