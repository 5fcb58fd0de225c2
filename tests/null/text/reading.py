"""Texts as a client joins them, and as a grammar allows them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.structured import StructuredOutputsParams
from quire.text.grammar import GrammarCompiler, grammar_of
from quire.text.matcher import Matcher
from quire.text.message import MessageReader, PieceKind, WholeMessage
from quire.text.tokenizer import HfTokenizer


def joined(reader: MessageReader, chunks: Sequence[str]) -> WholeMessage:
    """What a client joins: begins come before their arguments, and calls are numbered in order."""
    message, newest = WholeMessage(), -1
    for chunk in [*chunks, None]:
        for piece in reader.finish() if chunk is None else reader.feed(chunk):
            assert piece.text
            newest += piece.kind is PieceKind.CALL
            if piece.kind in (PieceKind.CALL, PieceKind.ARGUMENTS):
                assert piece.call == newest
            message.add(piece)
    assert reader.n_calls == newest + 1
    return message


def matcher_behind(
    compiler: GrammarCompiler, tokenizer: HfTokenizer, text: str, params: StructuredOutputsParams
) -> Matcher | None:
    """The grammar's state behind a text that it allows token by token; None: it does not."""
    params.verify()
    matcher = compiler.compile(grammar_of(params))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask()[token // 8] >> token % 8 & 1:
            return None
        assert matcher.accept(token)
    return matcher
