"""What the null device computes instead of a model: rows of K/V and tokens as digests of what they depend on.

Owns that arithmetic and its slow reference. Does not own pages or plans (`null.py`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence

from quire.core.logprobs import TokenLogprobs
from quire.core.plan import SlotParams

ROW_BYTES = 8
UNWRITTEN = bytes(ROW_BYTES)
"""Every written row has a first byte that is not 0, so eight zero bytes never occur in written rows."""
NON_FINITE = b"\xff" * ROW_BYTES
"""A row that is not a number; whatever is computed from it is not one either."""


class State:
    """What a group shows of the rows so far."""

    def __init__(self, window: int, rows: bytes = b"") -> None:
        self._window = window
        self._rows = bytearray(rows) if window else bytearray()
        """The last rows, where there is a window."""
        self._digest = hashlib.blake2b(rows, digest_size=ROW_BYTES)
        """Of all rows, where there is none."""

    def seen(self) -> hashlib.blake2b:
        """A digest of the rows that the next token sees."""
        if not self._window:
            return self._digest.copy()
        first = first_seen(self._window, len(self._rows) // ROW_BYTES)
        return hashlib.blake2b(self._rows[first * ROW_BYTES :], digest_size=ROW_BYTES)

    def row(self, token: int) -> bytes:
        """K/V of a token after these rows; the first byte is never 0."""
        digest = self.seen()
        digest.update(token.to_bytes(8, "little"))
        row = digest.digest()
        return bytes((row[0] | 1,)) + row[1:]

    def add(self, row: bytes) -> None:
        """One more."""
        if self._window:
            self._rows += row
        else:
            self._digest.update(row)

    def spoil(self) -> None:
        """Be wrong from now on."""
        self.add(b"\1garbage")


def first_seen(window: int, n_tokens: int) -> int:
    """The first row that token number `n_tokens` sees."""
    return max(0, n_tokens - window + 1) if window else 0


def null_reference(
    prompt: Sequence[int],
    params: SlotParams,
    n_tokens: int,
    vocab_size: int,
    windows: Sequence[int] = (0,),
    grammar: Callable[[Sequence[int]], set[int]] | None = None,
) -> list[int]:
    """The tokens that the null device must produce after `prompt`, computed alone, in order, without pages.

    `n_tokens` of them, or fewer if the masks leave nothing to choose. grammar: what may follow all tokens so far.
    """
    states = [State(window) for window in windows]
    tokens = list(prompt)
    for at in range(len(prompt) + n_tokens):
        if at == len(tokens):
            token = choose(states, params, at, vocab_size, None if grammar is None else grammar(tokens))
            if token is None:
                break
            tokens.append(token)
        for state in states:
            state.add(state.row(tokens[at]))
    return tokens[len(prompt) :]


def null_logprobs(token: int, n_top: int, vocab_size: int) -> TokenLogprobs:
    """The row that the null device reports for any token: made up, a function of the token, exact in float32."""
    top_ids = [(token + i) % vocab_size for i in range(n_top)]
    chosen = -0.5 - token / (1 << vocab_size.bit_length())
    return TokenLogprobs(chosen, 1, top_ids, [chosen - i for i in range(n_top)])


def choose(
    states: list[State], params: SlotParams, position: int, vocab_size: int, allowed: set[int] | None = None
) -> int | None:
    """The token at `position`: a function of the rows it sees, the seed and the position; None if all are masked."""
    digest = states[0].seen()
    for state in states[1:]:
        digest.update(state.seen().digest())
    digest.update(struct.pack("<QQ", params.seed, position))
    number = int.from_bytes(digest.digest(), "little")
    ids: Sequence[int] = params.allowed_token_ids or range(vocab_size)
    masked = set(params.masked_end_ids) if position < params.masked_until else set()
    for i in range(len(ids)):
        token = ids[(number + i) % len(ids)]
        if token not in masked and (allowed is None or token in allowed):
            return token
    return None


def guess(
    states: list[State], params: SlotParams, token: int, start: int, most: int, vocab_size: int, acceptance: float
) -> list[int]:
    """Drafts behind a token at `start`: what `choose` says where nothing is excluded, until one is wrong by chance.
    states: of what is before the token, which this moves."""
    n_made = most if chance(params, start + 1_000_003) < acceptance else most // 2
    drafts = list[int]()
    for position in range(start, start + n_made):
        for state in states:
            state.add(state.row(token))
        token = choose(states, params, position + 1, vocab_size) or 0
        if chance(params, position) >= acceptance:
            token = (token + 1) % vocab_size
        drafts.append(token)
    return drafts


def allowed_ids(bits: bytes | memoryview, n_lines: int, vocab_size: int) -> Iterator[set[int]] | None:
    """What each line of `StepMasks` allows; None if they are not so many lines of whole words."""
    n_bytes = len(bits) // n_lines
    if n_bytes % 4 or n_bytes * n_lines != len(bits):
        return None
    ids = range(min(vocab_size, 8 * n_bytes))
    return ({t for t in ids if bits[at * n_bytes + t // 8] >> t % 8 & 1} for at in range(n_lines))


def chance(params: SlotParams, position: int) -> float:
    """In [0, 1), by seed and position: a draft is right below the chance of drafts to be right."""
    digest = hashlib.blake2b(struct.pack("<QQ", params.seed, position), digest_size=4, person=b"draft").digest()
    return int.from_bytes(digest, "little") / 2**32
