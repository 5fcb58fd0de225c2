"""Large bodies are measured before they are decoded, and give the same value or refusal as small ones."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.serve.http import decoding, json_scan
from quire.serve.http.decoding import MAX_ESCAPES, MAX_NUMBERS, MAX_VALUES, BodyDecoder
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.json_scan import count_body, cuts, find_ids, largest_member, skip_string
from quire.serve.http.refusal import Refusal
from quire.serve.openai.schema import CompletionRequest, DetokenizeRequest, EmbeddingRequest

TEXTS = st.text(st.sampled_from('ab"\\\n{}[]:,tfn1é😀/'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)
WINDOWS = st.sampled_from([2, 3, 7, 64, 65536])


def counts(value: Any) -> tuple[int, int, int]:
    """(numbers, everything else, empty lists and objects)"""
    if isinstance(value, dict):
        inner = [counts(item) for item in value.values()]
        own = (0, 1 + len(value), not value)
    elif isinstance(value, list):
        inner, own = [counts(item) for item in value], (0, 1, not value)
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        inner, own = [], (int(is_number), int(not is_number), 0)
    return tuple(sum(column) for column in zip(own, *inner, strict=True))  # type: ignore[return-value]


def written(value: Any, escaped: bool, spaced: bool) -> bytes:
    return json.dumps(value, ensure_ascii=escaped, indent=1 if spaced else None).encode("utf-8", "surrogatepass")


@given(VALUES, WINDOWS, st.booleans(), st.booleans())
@settings(max_examples=300)
def test_the_census_is_right_wherever_windows_end(value: Any, window: int, escaped: bool, spaced: bool) -> None:
    body = written(value, escaped, spaced)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "WINDOW_BYTES", window)
        found = count_body(body, 10**9)
    n_numbers, n_others, n_empty = counts(value)
    assert found.n_others == n_others and found.n_escapes == body.count(b"\\")
    assert n_numbers <= found.n_numbers <= n_numbers + n_empty, "an empty list counts as if it held a number"


@given(st.binary(max_size=200), WINDOWS)
def test_what_is_no_json_is_judged_too(body: bytes, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "WINDOW_BYTES", window)
        found = count_body(body, 10**9)
        assert found.n_escapes == body.count(b"\\") and found.n_others >= 0
        find_ids(body, b"prompt")
        largest_member(body, 10**9)


def test_counting_ends_where_it_is_too_much() -> None:
    assert count_body(b"[]," * 5_000_000, 1000).n_others < 100_000


@pytest.mark.parametrize("tail", [b'"', b"", b'\\"', b"\\", b'\\\\"x', b'\\\\\\"x"'])
def test_strings_end_where_they_end(tail: bytes) -> None:
    for n in range(8):
        body = b'"' + b"x" * n + tail
        expected = next(
            (i + 1 for i in range(1, len(body)) if body[i : i + 1] == b'"' and escapes(body, i) % 2 == 0), -1
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_scan, "WINDOW_BYTES", 4)
            assert skip_string(body, 0) == (expected if expected > 0 else len(body))


def escapes(body: bytes, at: int) -> int:
    """Backslashes in a row before a place."""
    return len(body[:at]) - len(body[:at].rstrip(b"\\"))


@given(st.lists(st.integers(0, 10**6), max_size=60), WINDOWS)
def test_numbers_are_cut_at_commas(numbers: list[int], window: int) -> None:
    body = json.dumps(numbers).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "WINDOW_BYTES", max(window, 9))
        pieces = [body[start:stop] for start, stop in cuts(body, 1, len(body) - 1)]
    assert b",".join(pieces) == body[1:-1] and all(b"," not in piece[-1:] for piece in pieces)


IDS = st.lists(st.integers(0, 10**5), max_size=30)
PROMPTS = IDS | st.lists(IDS, max_size=8) | st.lists(TEXTS, max_size=4) | TEXTS
BODIES = st.fixed_dictionaries(
    {"model": TEXTS},
    optional={
        "prompt": PROMPTS, "stop": st.lists(TEXTS, max_size=3), "stop_token_ids": IDS, "user": TEXTS,
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.integers(-9, 9), max_size=4),
        "guided_json": st.dictionaries(TEXTS, VALUES, max_size=3),
    },
)  # fmt: skip


@given(BODIES, WINDOWS, st.booleans(), st.integers(0, 3))
@settings(max_examples=300)
def test_large_bodies_give_what_small_ones_give(
    body: dict[str, Any], window: int, spaced: bool, most_numbers: int
) -> None:
    """With limits so low that every path is taken; only what the limits refuse may differ."""
    data = written(body, False, spaced)
    known = {name: value for name, value in body.items() if name in CompletionRequest.__struct_fields__}
    expected = msgspec.json.decode(written(known, False, spaced), type=CompletionRequest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_scan, "WINDOW_BYTES", max(window, 9))
        patch.setattr(decoding, "LARGE_BYTES", 0)
        patch.setattr(decoding, "MAX_NUMBERS", most_numbers)
        try:
            assert BodyDecoder(CompletionRequest, "prompt").decode(data, IgnoredParams()) == expected
        except Refusal as refusal:
            assert refusal.code == "body_too_complex"
            outside = counts({key: value for key, value in body.items() if key != "prompt"})
            inside = counts(body.get("prompt"))
            assert outside[0] + outside[2] > most_numbers or inside[1] + inside[2] > 0


def refusal_of(data: bytes, kind: Any = CompletionRequest, field: str = "prompt") -> Refusal:
    with pytest.raises(Refusal) as found:
        BodyDecoder(kind, field).decode(data, IgnoredParams())
    return found.value


LONG = b"1," * (MAX_NUMBERS + 10)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (b"[" + LONG + b"]", "invalid_json"),
        (b"[" + LONG + b",1]", "invalid_json"),
        (b"[," + LONG + b"1]", "invalid_json"),
        (b"[" + LONG + b"1.5]", "invalid_type"),
        (b"[" + LONG + b"true]", "invalid_type"),
        (b"[" + LONG + b"x]", "invalid_json"),
        (b"[[" + LONG + b"1],1]", "invalid_value"),
        (b"[[" + LONG + b"1]]]", "invalid_json"),
        (b"[[" + LONG + b"1] [1]]", "invalid_value"),
        (b"[[" + LONG + b"1],]", "invalid_value"),
        (b"[" + LONG + b'"x"]', "body_too_complex"),
        (b"[" + LONG + b"1", "body_too_complex"),
        (b"[[[" + LONG + b"1]]]", "body_too_complex"),
    ],
    ids=["comma at end", "two commas", "comma first", "float", "true", "word", "mixed", "bracket", "no comma", "comma",
         "text among", "open", "deep"],
)  # fmt: skip
def test_broken_lists_of_token_ids_are_refused(prompt: bytes, code: str) -> None:
    refusal = refusal_of(b'{"model":"m","prompt":' + prompt + b"}")
    assert refusal.status == 400 and refusal.code == code and len(refusal.message) < 400
    assert code == "invalid_json" or refusal.param == "prompt"


def test_long_lists_of_token_ids_are_taken() -> None:
    draw = random.Random(4)
    ids = [draw.randrange(200_000) for _ in range(MAX_NUMBERS + 1000)]
    flat = BodyDecoder(CompletionRequest, "prompt").decode(
        json.dumps({"model": "m", "prompt": ids, "n": 2}).encode(), IgnoredParams()
    )
    assert flat.prompt == ids and flat.n == 2
    nested = {"model": "m", "input": [ids[:7], [], ids[7:]], "user": "u"}
    found: EmbeddingRequest = BodyDecoder(EmbeddingRequest, "input").decode(
        json.dumps(nested, indent=1).encode(), IgnoredParams()
    )
    assert found.input == nested["input"] and found.user == "u"
    tokens: DetokenizeRequest = BodyDecoder(DetokenizeRequest, "tokens").decode(
        json.dumps({"tokens": ids}).encode(), IgnoredParams()
    )
    assert tokens.tokens == ids


def test_only_the_field_of_the_outermost_object_counts() -> None:
    for body in (
        b'{"model":"m","metadata":{"prompt":[' + LONG + b"1]}}",
        b'{"model":"m","prompt":[' + LONG + b'1],"prompt":[' + LONG + b"1]}",
        b'{"model":"m","\\u0070rompt":[' + LONG + b"1]}",
    ):
        assert refusal_of(body).code == "body_too_complex"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","prompt":[' + b'"x",' * MAX_VALUES + b'"x"]}', "prompt"),
        (b'{"model":"m","prompt":"x","guided_json":{"a":[' + b"[]," * MAX_VALUES + b"[]]}}", "guided_json"),
        (b'{"model":"m","prompt":"x","metadata":{' + b'"k":"v",' * MAX_VALUES + b'"k":"v"}}', "metadata"),
        (b'{"model":"m","prompt":"x","logit_bias":{' + b'"1":1,' * MAX_VALUES + b'"1":1}}', "logit_bias"),
        (b'{"model":"m","prompt":"x","stop_token_ids":[' + LONG + b"1]}", "stop_token_ids"),
        (b'{"model":"m","prompt":"' + b"\\n" * (MAX_ESCAPES + 1) + b'"}', "prompt"),
        (b"[" * (MAX_VALUES + 1), None),
        (b"n" * (MAX_VALUES + 1), None),
    ],
    ids=["texts", "lists", "labels", "bias", "numbers", "escapes", "brackets", "words"],
)
def test_bodies_that_would_keep_the_interpreter_are_refused_and_say_where(body: bytes, param: str | None) -> None:
    refusal = refusal_of(body)
    assert refusal.status == 400 and refusal.code == "body_too_complex" and refusal.param == param
    assert "at most" in refusal.message or "more than" in refusal.message
