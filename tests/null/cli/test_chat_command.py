"""The conversation loop of `quire chat` and the printing of `quire generate`, with a model that is a function."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator

import pytest

from quire.cli.chat import ChatHistory, Message, converse, obey, stoppable
from quire.cli.generate import print_all, print_stream, read_prompt
from quire.core.errors import ConfigError, ContextLengthExceeded, EngineError
from quire.core.failure import Code, Failure
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.text.harmony import HarmonyReader


def outputs(*texts: str) -> RequestOutput:
    parts = [CompletionOutput(i, text, []) for i, text in enumerate(texts)]
    return RequestOutput("r", None, [], parts, False)


class Parrot:
    """Answers with the last message in two deltas; remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    def __call__(self, messages: list[Message]) -> Iterator[RequestOutput]:
        self.seen.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "long":
            raise ContextLengthExceeded("too long")
        yield outputs(text[:2])
        yield outputs(text[2:])


def talk(*lines: str, system: str = "") -> tuple[str, Parrot, ChatHistory]:
    target, parrot, conversation = io.StringIO(), Parrot(), ChatHistory(system)
    converse(iter(lines), parrot, target, conversation)
    return target.getvalue(), parrot, conversation


def test_history_grows_by_both_turns() -> None:
    text, parrot, conversation = talk("hello", "", "bye")
    assert text == "hello\nbye\n"
    assert [message["role"] for message in parrot.seen[1]] == ["user", "assistant", "user"]
    assert conversation.turns[-1] == {"role": "assistant", "content": "bye"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("target", [io.StringIO(), Terminal()])
def test_reasoning_is_not_what_was_said(target: io.StringIO) -> None:
    """In gpt-oss's format, cut amid a mark: shown faint on a terminal, and no part of the history."""
    conversation = ChatHistory()

    def answer(messages: list[Message]) -> Iterator[RequestOutput]:
        text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>"
        last = outputs(text[50:])
        last.outputs[0].finish_reason = "stop"
        yield from (outputs(text[:50]), last)

    converse(iter(["1 + 2"]), answer, target, conversation, lambda: HarmonyReader(()))
    assert conversation.turns[-1] == {"role": "assistant", "content": "It is 3."}
    shown = "\x1b[2mhm\x1b[0m\n\n" if target.isatty() else ""
    assert target.getvalue() == f"{shown}It is 3.\n"


def test_system_message_leads() -> None:
    _, parrot, _ = talk("hi", "/system be kind", "hello", system="be brief")
    assert parrot.seen[0][0] == {"role": "system", "content": "be brief"}
    assert [message["content"] for message in parrot.seen[1]] == ["be kind", "hello"]


def test_clear_forgets_turns_only() -> None:
    _, parrot, _ = talk("one", "/clear", "two", system="s")
    assert [message["content"] for message in parrot.seen[1]] == ["s", "two"]


def test_exit_stops_and_other_commands_are_explained() -> None:
    text, parrot, _ = talk("/hlp", "/help", "/exit", "never")
    assert parrot.seen == []
    assert "unknown command /hlp; did you mean /help?" in text and "/system" in text


def test_a_refused_message_is_forgotten() -> None:
    text, parrot, conversation = talk("long", "ok")
    assert text.startswith("refused: too long")
    assert [message["content"] for message in parrot.seen[1]] == ["ok"]
    assert len(conversation.turns) == 2


class Interrupted:
    """Answers a b c without end; Ctrl-C is pressed `n_presses` times before b."""

    def __init__(self, n_presses: int) -> None:
        self.n_presses = n_presses
        self.n_closed = 0

    def __call__(self, messages: list[Message]) -> Iterator[RequestOutput]:
        try:
            yield outputs("a")
            for _ in range(self.n_presses):
                signal.raise_signal(signal.SIGINT)
            yield outputs("b")
            yield outputs("c")
        finally:
            self.n_closed += 1


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation() -> None:
    before = signal.getsignal(signal.SIGINT)
    target, answer, conversation = io.StringIO(), Interrupted(1), ChatHistory()
    converse(iter(["one", "two"]), stoppable(answer), target, conversation)
    assert target.getvalue() == "ab\nab\n" and answer.n_closed == 2
    assert [message["content"] for message in conversation.turns] == ["one", "ab", "two", "ab"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves() -> None:
    answer = Interrupted(2)
    with pytest.raises(KeyboardInterrupt):
        converse(iter(["one"]), stoppable(answer), io.StringIO(), ChatHistory())
    assert answer.n_closed == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_system_without_text_removes_it() -> None:
    conversation = ChatHistory("x", [{"role": "user", "content": "y"}])
    assert obey("/system", conversation, io.StringIO())
    assert conversation.messages == []


def test_stream_is_printed_as_it_comes() -> None:
    target = io.StringIO()
    assert print_stream(iter([outputs("ab"), outputs("c")]), target) == "abc"
    assert target.getvalue() == "abc\n"


def test_a_failed_answer_is_an_error() -> None:
    failed = outputs("x")
    failed.outputs[0].finish_reason, failed.outputs[0].failure = "error", Failure(Code.NON_FINITE_LOGITS, "why")
    with pytest.raises(EngineError, match="non_finite_logits"):
        print_stream(iter([outputs("ab"), failed]), io.StringIO())


def test_several_prompts_get_headings() -> None:
    target = io.StringIO()
    print_all([outputs("a", "b"), outputs("c", "d")], target)
    assert target.getvalue().splitlines()[:3] == ["--- prompt 1 of 2, 1 of 2", "a", "--- prompt 1 of 2, 2 of 2"]


def test_prompt_comes_from_a_pipe_but_not_from_a_person() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert read_prompt(io.StringIO("text\n")) == "text\n"
    for stream in (Terminal("x"), io.StringIO("")):
        with pytest.raises(ConfigError):
            read_prompt(stream)
