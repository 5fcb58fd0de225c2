"""The JSON of logprobs, joined from packed columns, against the same laid out value by value."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from serve_fakes import byte_tokenizer

from quire.core.logprobs import Logprob, LogprobRows, PackedLogprobs, TokenLogprobs
from quire.serve.openai.logprobs import (
    BLOCK_CELLS,
    FLOOR,
    MAX_REMEMBERED,
    TextLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_pieces,
)

TOKENIZER = byte_tokenizer()


def reference_chat(rows: list[dict[int, Logprob]], n_top: int, names: TokenNames) -> Any:
    def entry(token: int, one: Logprob) -> dict[str, Any]:
        value = max(one.logprob, FLOOR)
        return {"token": names.text(token), "logprob": value, "bytes": list(names.encoded(token))}

    content = []
    for row in rows:
        chosen, one = next(iter(row.items()))
        top = [pair for pair in row.items() if pair[1].rank is not None and pair[1].rank <= n_top]
        top.sort(key=lambda pair: (-pair[1].logprob, pair[0]))
        content.append({**entry(chosen, one), "top_logprobs": [entry(*pair) for pair in top[:n_top]]})
    return {"content": content, "refusal": None}


def reference_text(token_ids: list[int], rows: list[dict[int, Logprob] | None], names: TokenNames) -> Any:
    tokens, values, tops, offsets, offset = [], [], [], [], 0
    for token, row in zip(token_ids, rows, strict=True):
        top: dict[str, float] = {}
        for one, entry in (row or {}).items():
            top[names.text(one)] = max(top.get(names.text(one), FLOOR), max(entry.logprob, FLOOR))
        tokens.append(names.text(token))
        values.append(None if row is None else max(row[token].logprob, FLOOR))
        tops.append(None if row is None else top)
        offsets.append(offset)
        offset += len(names.text(token))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def reference_prompt(rows: list[dict[int, Logprob] | None], names: TokenNames) -> Any:
    return [
        None
        if row is None
        else {
            str(token): {
                "logprob": max(one.logprob, FLOOR),
                "rank": one.rank,
                "decoded_token": names.text(token),
            }
            for token, one in row.items()
        }
        for row in rows
    ]


def hard_rows(draw: random.Random, n: int, k: int) -> tuple[list[int], PackedLogprobs]:
    """Chosen tokens among the most probable and not, ties at every place, and minus infinity."""
    tokens, rows = [], []
    for _ in range(n):
        ids = draw.sample(range(262), k)  # from 259 on no token has text: they are equal in a dict by text
        values = [draw.choice([-0.5, -1.0, -1.5, float("-inf")]) for _ in range(k)]
        pairs = sorted(zip(values, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))  # as the engine gives them
        values, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        at = draw.randrange(k + 2)
        if at < k:
            token, value, rank = ids[at], values[at], 1 + sum(one > values[at] for one in values)
        else:
            token = draw.choice([one for one in range(262) if one not in ids])
            value = draw.choice([values[-1] if k else -1.0, -7.25, float("-inf")])
            rank = 1 + sum(one > value for one in values) + draw.choice([0, 3])
        tokens.append(token)
        rows.append(TokenLogprobs(value, rank, ids, values))
    return tokens, PackedLogprobs.of(rows)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 20])
def test_packed_columns_give_what_dicts_give(k: int, as_ids: bool) -> None:
    draw, names = random.Random(f"{k} {as_ids}"), TokenNames(TOKENIZER, as_ids)
    for n in (0, 1, 7, 200, BLOCK_CELLS // (1 + k) + 1):
        tokens, packed = hard_rows(draw, n, k)
        rows = LogprobRows(names.text)
        rows.add(packed, tokens)
        dicts = list(rows)
        for n_top in {k, k // 2}:
            assert json.loads(chat_logprobs(rows, n_top, names)) == reference_chat(dicts, n_top, names)
        prompt = LogprobRows(names.text, first=65)
        prompt.add(packed, tokens)
        assert list(prompt) == [None, *dicts]
        text = json.loads(TextLogprobs(names).piece([prompt, rows]))
        assert text == reference_text([65, *tokens, *tokens], [None, *dicts, *dicts], names)
        assert json.loads(b"".join(prompt_pieces(prompt, names))) == reference_prompt([None, *dicts], names)


def test_offsets_go_on_from_piece_to_piece() -> None:
    names = TokenNames(TOKENIZER, as_ids=False)
    columns = TextLogprobs(names)
    assert json.loads(columns.piece([[72, 105]]))["text_offset"] == [0, 1]
    last = {"tokens": [TOKENIZER.token_text(72)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [2]}
    assert json.loads(columns.piece([[72]])) == last


def test_rows_read_like_a_list_of_dicts() -> None:
    tokens, packed = hard_rows(random.Random(0), 5, 3)
    rows = LogprobRows(TOKENIZER.token_text)
    rows.add(packed, tokens)
    whole = list(rows)
    assert rows == whole and whole == rows and rows != whole[:-1] and len(rows) == 5
    assert rows[-1] == whole[4] and rows[1:3] == whole[1:3] and repr(rows) == repr(whole)
    assert [next(iter(row)) for row in rows] == tokens
    assert whole[0][tokens[0]].decoded_token == TOKENIZER.token_text(tokens[0])
    with pytest.raises(IndexError):
        rows[5]
    with pytest.raises(ValueError, match="4 rows of logprobs for 5 tokens"):
        LogprobRows(TOKENIZER.token_text).add(PackedLogprobs.of(packed.rows()[:4]), tokens)
    other = LogprobRows(TOKENIZER.token_text)
    other.join(rows)
    other.join(rows)
    assert other == [*whole, *whole] and other.n_cells == 2 * rows.n_cells == 2 * 5 * 4


def test_packing_keeps_every_value() -> None:
    _, packed = hard_rows(random.Random(1), 50, 4)
    assert PackedLogprobs.of(packed.rows()) == packed
    with pytest.raises(ValueError, match="rows of 1"):
        PackedLogprobs.of([TokenLogprobs(0.0, 1, [1], [0.0]), TokenLogprobs(0.0, 1, [], [])])


def test_names_that_are_remembered_are_bounded() -> None:
    names = TokenNames(None, as_ids=True)
    for token in range(MAX_REMEMBERED + 5):
        assert names.quoted[token] == b'"token_id:%d"' % token
    assert len(names.quoted) == 5
