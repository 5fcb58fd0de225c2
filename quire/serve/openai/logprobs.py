"""Log-probabilities in the two shapes of the OpenAI API and in vLLM's for prompts, as JSON text. Owns no arithmetic.

A row has up to 21 values and a token about 10 objects a value if it is laid out as such, so the text is joined from the
packed columns: a token's own text is encoded once and remembered. Everything is laid out some rows at a time.
Invariants: every number is finite JSON; two tokens with the same text keep the larger value in a dict keyed by text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from quire.core.logprobs import Columns, LogprobRows
from quire.text.tokenizer import HfTokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value."""
MAX_REMEMBERED = 1 << 15
"""Tokens whose text is kept, about 300 bytes each; then it begins anew."""
BLOCK_CELLS = 4096
"""Values that are laid out at a time: about a millisecond."""

T = TypeVar("T")
TextPart = list[int] | LogprobRows
"""Tokens without values, or rows."""
encode = msgspec.json.encode


class TokenNames:
    """How tokens are called in answers: by their text, or as `token_id:N` when asked for or without a tokenizer."""

    def __init__(self, tokenizer: HfTokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self.quoted = _Remembered(self._quote)
        """Token id → its name as a JSON string."""
        self.lengths = _Remembered(lambda token_id: len(self.text(token_id)))
        """Token id → characters of its name."""
        self.entries = _Remembered(self._open_entry)
        """Token id → the entry of a chat answer up to its value."""
        self.ends = _Remembered(self._end_entry)
        """Token id → the same after its value, without the last brace."""

    def text(self, token_id: int) -> str:
        """The name of a token."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def encoded(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; also when they are no whole character."""
        return self.text(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _quote(self, token_id: int) -> bytes:
        return encode(self.text(token_id))

    def _open_entry(self, token_id: int) -> bytes:
        return b'{"token":%b,"logprob":' % encode(self.text(token_id))

    def _end_entry(self, token_id: int) -> bytes:
        return b',"bytes":%b' % encode(list(self.encoded(token_id)))


class _Remembered(dict[int, T]):
    """Fills itself; bounded."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        found = self[token_id] = self._make(token_id)
        return found


def chat_logprobs(rows: LogprobRows | None, n_top: int, names: TokenNames) -> bytes:
    """`choices[].logprobs` of a chat answer: one entry a token, each with its `n_top` most probable tokens.

    Of equally probable ones the lower id comes first, also before the token that stands there.
    """
    return b"".join(chat_pieces(rows, n_top, names))


def chat_pieces(rows: LogprobRows | None, n_top: int, names: TokenNames) -> Iterator[bytes]:
    """The same in pieces."""
    yield b'{"content":'
    yield from chat_entries(rows, n_top, names)
    yield b',"refusal":null}'


def chat_entries(rows: LogprobRows | None, n_top: int, names: TokenNames) -> Iterator[bytes]:
    """The list of the entries alone, in pieces."""
    return _listed(_chat_rows(columns, n_top, names) for columns in _blocks(rows))


def _chat_rows(columns: Columns, n_top: int, names: TokenNames) -> list[bytes]:
    entries, ends, k = names.entries, names.ends, columns.n_top
    chosen, tops = _numbers(columns.chosen), _numbers(columns.top_logprobs)
    found = []
    for at, (token, value) in enumerate(zip(columns.token_ids, chosen, strict=True)):
        start = at * k
        ids, values = columns.top_ids[start : start + k], tops[start : start + k]
        if n_top < k or (columns.ranks[at] <= k and token not in ids):
            ids, values = _most_probable(columns, at, ids, values, value, n_top)
        top = b",".join([entries[one] + its + ends[one] + b"}" for one, its in zip(ids, values, strict=True)])
        found.append(b'%b%b%b,"top_logprobs":[%b]}' % (entries[token], value, ends[token], top))
    return found


def _most_probable(
    columns: Columns, at: int, ids: list[int], values: list[bytes], value: bytes, n_top: int
) -> tuple[list[int], list[bytes]]:
    """The `n_top` most probable tokens of a row, the chosen one among them where it is as probable."""
    token, start = columns.token_ids[at], at * columns.n_top
    rows = [(columns.chosen[at], token, value)] if columns.ranks[at] <= n_top else []
    others = zip(columns.top_logprobs[start : start + n_top], ids, values, strict=False)
    rows += [row for row in others if row[1] != token]
    rows.sort(key=lambda row: (-row[0], row[1]))
    return [row[1] for row in rows[:n_top]], [row[2] for row in rows[:n_top]]


class TextLogprobs:
    """`choices[].logprobs` of a text completion, over one choice: offsets go on from piece to piece."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def piece(self, parts: list[TextPart]) -> bytes:
        """Columns for the tokens of these parts, in order, as JSON."""
        return b"".join(self.pieces(parts))

    def pieces(self, parts: list[TextPart]) -> Iterator[bytes]:
        """The same in pieces."""
        names = self._names
        yield b'{"tokens":'
        yield from _listed([names.quoted[token] for token in ids] for ids, _ in _text_blocks(parts))
        yield b',"token_logprobs":'
        yield from _listed(_values(ids, columns) for ids, columns in _text_blocks(parts))
        yield b',"top_logprobs":'
        yield from _listed(_tops(ids, columns, names) for ids, columns in _text_blocks(parts))
        yield b',"text_offset":'
        yield from _listed(self._offsets(ids) for ids, _ in _text_blocks(parts))
        yield b"}"

    def _offsets(self, token_ids: list[int]) -> list[bytes]:
        found = []
        for token in token_ids:
            found.append(b"%d" % self._offset)
            self._offset += self._names.lengths[token]
        return found


def _text_blocks(parts: list[TextPart]) -> Iterator[tuple[list[int], Columns | None]]:
    """Token ids of some positions, and their columns if they have values."""
    for part in parts:
        if isinstance(part, list):
            yield part, None
            continue
        if part.first is not None:
            yield [part.first], None
        for columns in _blocks(part):
            yield columns.token_ids, columns


def _values(token_ids: list[int], columns: Columns | None) -> list[bytes]:
    return [b"null"] * len(token_ids) if columns is None else _numbers(columns.chosen)


def _tops(token_ids: list[int], columns: Columns | None, names: TokenNames) -> list[bytes]:
    if columns is None:
        return [b"null"] * len(token_ids)
    quoted, k = names.quoted, columns.n_top
    chosen, tops = _numbers(columns.chosen), _numbers(columns.top_logprobs)
    found = []
    for at, (token, value) in enumerate(zip(token_ids, chosen, strict=True)):
        ids = columns.top_ids[at * k : at * k + k]
        row = {quoted[token]: value}
        for one, its in zip(ids, tops[at * k : at * k + k], strict=True):
            if one != token:
                row.setdefault(quoted[one], its)
        if len(row) < k + (token not in ids):
            row = _larger(columns, at, names)
        found.append(b"{" + b",".join([name + b":" + its for name, its in row.items()]) + b"}")
    return found


def _larger(columns: Columns, at: int, names: TokenNames) -> dict[bytes, bytes]:
    """A row in which two tokens have the same text."""
    token, start, row = columns.token_ids[at], at * columns.n_top, {}
    row[names.quoted[token]] = columns.chosen[at]
    for place in range(start, start + columns.n_top):
        name, value = names.quoted[columns.top_ids[place]], columns.top_logprobs[place]
        if columns.top_ids[place] != token:
            row[name] = max(row.get(name, value), value)
    return dict(zip(row, _numbers(list(row.values())), strict=True))


def prompt_pieces(rows: LogprobRows | None, names: TokenNames) -> Iterator[bytes]:
    """vLLM's `prompt_logprobs`: one dict a prompt token, token id → values; the first is null."""
    first = [] if rows is None or rows.first is None else [[b"null"]]
    return _listed(itertools.chain(first, (_prompt_rows(columns, names) for columns in _blocks(rows))))


def _prompt_rows(columns: Columns, names: TokenNames) -> list[bytes]:
    quoted, k = names.quoted, columns.n_top
    chosen, tops = _numbers(columns.chosen), _numbers(columns.top_logprobs)
    found = []
    for at, token in enumerate(columns.token_ids):
        entries = [_PROMPT_ENTRY % (token, chosen[at], columns.ranks[at], quoted[token])]
        entries += [
            _PROMPT_ENTRY % (columns.top_ids[place], tops[place], rank, quoted[columns.top_ids[place]])
            for rank, place in enumerate(range(at * k, at * k + k), start=1)
            if columns.top_ids[place] != token
        ]
        found.append(b"{" + b",".join(entries) + b"}")
    return found


_PROMPT_ENTRY = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'


def _blocks(rows: LogprobRows | None) -> Iterator[Columns]:
    if rows is None:
        return iter(())
    n, n_block = len(rows.token_ids), max(1, BLOCK_CELLS // (1 + rows.n_top))
    return (rows.columns(start, min(start + n_block, n)) for start in range(0, n, n_block))


def _listed(blocks: Iterable[list[bytes]]) -> Iterator[bytes]:
    """A JSON list of the values of all blocks, one piece a block."""
    separator = b"["
    for block in blocks:
        if block:
            yield separator + b",".join(block)
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _numbers(values: list[float]) -> list[bytes]:
    """Each as JSON, finite."""
    return encode([value if value > FLOOR else FLOOR for value in values])[1:-1].split(b",") if values else []
