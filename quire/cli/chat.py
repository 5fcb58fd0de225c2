"""`quire chat [MODEL]`: a conversation in the terminal, streamed, with history; piped standard input works too.

Owns the loop and its slash commands. Invariant: what the model sees is `ChatHistory.messages` and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from quire.cli.generate import adapter_of, load_text_llm, print_stream
from quire.cli.interrupt import first_noted
from quire.cli.model import add_engine_flags, engine_config
from quire.cli.sampling import SamplingFlags, check_sampling, sampling_params
from quire.config.flags import add_flags
from quire.core.errors import RequestError
from quire.core.sampling import OutputKind
from quire.core.spelling import did_you_mean
from quire.text.harmony import HarmonyReader
from quire.text.harmony_tokens import has_mark_tokens, turn_ends
from quire.text.message import MessageReader, PieceKind

if TYPE_CHECKING:
    from quire.core.outputs import RequestOutput

Message = dict[str, str]
Answer = Callable[[list[Message]], "Iterator[RequestOutput]"]
FAINT = "\x1b[2m{}\x1b[0m"

HELP = """/help            this list
/clear           forget the conversation, keep the system message
/system [TEXT]   set the system message and forget the conversation; without TEXT remove it
/exit            leave (Ctrl-D and Ctrl-C too)
Ctrl-C           during an answer: stop it and keep what was said; once more: leave"""
COMMANDS = ("/help", "/clear", "/system", "/exit")


@dataclasses.dataclass(slots=True)
class ChatHistory:
    """The system message, if any, and the turns so far."""

    system: str = ""
    turns: list[Message] = dataclasses.field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """What the model is given."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire chat [MODEL] [options]"
    parser.add_argument("--system", default="", metavar="TEXT", help="system message of the conversation")
    add_flags(parser, SamplingFlags, title="sampling options", skip=("n",))
    add_engine_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit code."""
    check_sampling(namespace)
    config = engine_config(namespace, disable_log_stats=True)
    adapter = adapter_of(config)
    llm = load_text_llm(config)
    try:
        params = sampling_params(namespace, OutputKind.DELTA, llm)
        in_messages = has_mark_tokens(llm.tokenizer)
        if in_messages:  # as gpt-oss does
            params.skip_special_tokens = False
            if not params.ignore_eos:
                params.stop_token_ids = [*params.stop_token_ids, *turn_ends(llm.tokenizer)]
        interactive = sys.stdin.isatty()
        if interactive:
            print("Type a message; /help lists commands.", file=sys.stderr)
        lines = typed_lines() if interactive else (line.rstrip("\n") for line in sys.stdin)

        def answer(messages: list[Message]) -> Iterator[RequestOutput]:
            return llm.stream(llm.render_chat(messages), params, adapter)

        told = (lambda: HarmonyReader(())) if in_messages else None
        converse(lines, stoppable(answer) if interactive else answer, sys.stdout, ChatHistory(namespace.system), told)
    finally:
        llm.shutdown()
    return 0


def typed_lines() -> Iterator[str]:
    """Lines from a person, with history and editing where the platform has readline."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # importing it is what gives input() editing and history
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def stoppable(answer: Answer) -> Answer:
    """The same answers, but the first Ctrl-C ends one after its next part; closing it cancels the request."""

    def stopping(messages: list[Message]) -> Iterator[RequestOutput]:
        with first_noted() as stop, contextlib.closing(answer(messages)) as outputs:  # type: ignore[type-var]
            for output in outputs:
                yield output
                if stop.pressed:
                    return

    return stopping


def converse(
    lines: Iterator[str], answer: Answer, target: TextIO, conversation: ChatHistory,
    reader: Callable[[], MessageReader] | None = None,
) -> None:  # fmt: skip
    """Answer each line; a refused message is reported and forgotten, the conversation goes on. reader: of one answer;
    None: its text is what is said."""
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if text.startswith("/"):
            if not obey(text, conversation, target):
                return
            continue
        conversation.turns.append({"role": "user", "content": text})
        try:
            outputs = answer(conversation.messages)
            reply = print_stream(outputs, target) if reader is None else print_message(outputs, target, reader())
        except RequestError as error:
            conversation.turns.pop()
            target.write(f"refused: {error} (/clear starts afresh)\n")
            continue
        conversation.turns.append({"role": "assistant", "content": reply})


def print_message(outputs: Iterator[RequestOutput], target: TextIO, reader: MessageReader) -> str:
    """As `print_stream`, of an answer that says what in it is reasoning: that is shown faint, on a terminal alone, and
    is no part of what is returned."""
    content, is_thinking, shows = "", False, target.isatty()

    def said() -> Iterator[RequestOutput]:
        nonlocal content, is_thinking
        for output in outputs:
            part = output.outputs[0]
            pieces = [*reader.feed(part.text), *(reader.finish() if part.finish_reason else [])]
            part.text = ""
            for piece in pieces:
                if piece.kind is PieceKind.REASONING:
                    is_thinking = shows
                    part.text += FAINT.format(piece.text) if shows else ""
                    continue
                part.text += "\n\n" * is_thinking + piece.text
                content, is_thinking = content + piece.text, False
            yield output

    print_stream(said(), target)
    return content


def obey(text: str, conversation: ChatHistory, target: TextIO) -> bool:
    """Carry out a slash command; False when it ends the conversation."""
    command, _, rest = text.partition(" ")
    if command == "/exit":
        return False
    if command == "/help":
        target.write(HELP + "\n")
    elif command == "/clear":
        conversation.turns.clear()
    elif command == "/system":
        conversation.system = rest.strip()
        conversation.turns.clear()
    else:
        target.write(f"unknown command {command}{did_you_mean(command, COMMANDS)} (/help lists them)\n")
    return True
