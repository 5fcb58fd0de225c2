"""Traces from files: four spellings, and what is said of bad ones."""

from __future__ import annotations

import json
import pathlib

import pytest

from quire.bench.simulate.requests import SimRequest
from quire.bench.simulate.trace import read_trace
from quire.core.errors import ConfigError


def written(folder: pathlib.Path, text: str, name: str = "trace") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def lines(*rows: dict[str, object]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def test_own_spelling_as_json_and_as_csv(tmp_path: pathlib.Path) -> None:
    text = lines(
        {"arrival_s": 0.5, "input_len": 30, "output_len": 3, "prefix_group": "a", "prefix_len": 20},
        {"arrival_s": 1, "input_len": 30, "output_len": 2},
        {"arrival_s": 2, "output_len": 1, "prompt_token_ids": [4, 5]},
        {"arrival_s": 3, "input_len": 25, "output_len": 3, "prefix_group": "a", "prefix_len": 20},
    )
    requests, notes = read_trace(written(tmp_path, text))
    assert requests == [
        SimRequest(0.5, 30, 3, ((0, 20),)), SimRequest(1.0, 30, 2), SimRequest(2.0, 2, 1, token_ids=[4, 5]),
        SimRequest(3.0, 25, 3, ((0, 20),)),
    ] and not notes  # fmt: skip
    table = "arrival_s,input_len,output_len,prefix_group,prefix_len\n0.5,30,3,a,20\n1,30,2,,\n"
    assert read_trace(written(tmp_path, table))[0] == requests[:2]


def test_mooncake_has_milliseconds_and_hashes_of_512_tokens(tmp_path: pathlib.Path) -> None:
    text = lines(
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 2500, "input_length": 600, "output_length": 5, "hash_ids": [7, 3]},
    )
    first, second = read_trace(written(tmp_path, text))[0]
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.5)
    a, b = first.prompt(0), second.prompt(1)
    assert (len(a), len(b)) == (1100, 600) and a[:512] == b[:512] and a[512] != b[512]


def test_azure_has_dates(tmp_path: pathlib.Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0,3180,0\n"
    )
    first, second = read_trace(written(tmp_path, text))[0]
    assert first == SimRequest(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(1.02004) and second.output_len == 1


def test_what_a_server_recorded(tmp_path: pathlib.Path) -> None:
    text = lines(
        {"at_s": 1e9, "prompts": [{"length": 70, "marks": [11, 12]}], "n": 2, "n_output": 40, "seconds": 1},
        {"at_s": 1e9 + 3, "prompts": [{"length": 40, "marks": [11]}], "n": 1, "n_output": 0},
        {"at_s": 1e9 - 1, "prompts": [{"length": 40, "marks": [11]}], "n": 1, "n_output": 6},
    )
    requests, notes = read_trace(written(tmp_path, text))
    assert [(one.arrival_s, one.input_len, one.output_len) for one in requests] == [
        (0, 40, 6),
        (1, 70, 20),
        (1, 70, 20),
    ]
    assert requests[0].prompt(0)[:32] == requests[1].prompt(1)[:32] and "sorted" in notes[0]


def test_a_trace_out_of_order_is_sorted_and_that_is_said(tmp_path: pathlib.Path) -> None:
    rows = [{"arrival_s": at, "input_len": 1, "output_len": 1} for at in (2, 1, 3, 0)]
    requests, notes = read_trace(written(tmp_path, lines(*rows)))
    assert [one.arrival_s for one in requests] == [0, 1, 2, 3]
    assert notes == ["2 requests of the trace came before the one above them, the first in line 2: it was sorted"]


GOOD = {"arrival_s": 1.0, "input_len": 5, "output_len": 5}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (GOOD | {"arrival_s": -0.5}, "line 2: arrival_s is -0.5: a request cannot come before the trace begins"),
        ('{"arrival_s": NaN, "input_len": 5, "output_len": 5}', "line 2: not JSON"),
        (GOOD | {"arrival_s": "nan"}, "line 2: arrival_s is 'nan': write a finite number"),
        (GOOD | {"arrival_s": "inf"}, "line 2: arrival_s is 'inf': write a finite number"),
        (GOOD | {"arrival_s": True}, "line 2: arrival_s is 'True'"),
        (GOOD | {"arrival_s": 4e7}, "line 2: it comes 4e+07 s away from the first request, more than a year"),
        (GOOD | {"input_len": 0}, "line 2: input_len is '0': write a whole number of tokens from 1"),
        (GOOD | {"input_len": 2.5}, "line 2: input_len is '2.5'"),
        (GOOD | {"output_len": 1e300}, "line 2: output_len is"),
        ({"arrival_s": 1, "input_len": 5}, "line 2: output_len is missing"),
        (GOOD | {"prefix_group": "a"}, "line 2: prefix_len is missing"),
        (GOOD | {"prefix_group": "a", "prefix_len": 9}, "line 2: prefix_len is 9, more than the 5 tokens"),
        (GOOD | {"prompt_token_ids": [1, -2]}, "line 2: prompt_token_ids is not a list of whole numbers"),
        (GOOD | {"prompt_token_ids": [1, 2]}, "line 2: input_len is 5, prompt_token_ids has 2"),
        ({"when": 1, "input_len": 5}, "line 2: there is no time"),
        ("[1]", "line 2: not an object"),
        ({"at_s": 1, "prompts": 3, "n": 1, "n_output": 2}, "line 2: prompts is not a list"),
        ({"TIMESTAMP": "now", "ContextTokens": 1, "GeneratedTokens": 1}, "line 2: TIMESTAMP is 'now'"),
    ],
)
def test_bad_lines_are_named(tmp_path: pathlib.Path, bad: object, words: str) -> None:
    path = written(tmp_path, lines(GOOD) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad)))
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert words in str(refused.value)


def test_bad_files_are_named(tmp_path: pathlib.Path) -> None:
    for path, words in (
        (written(tmp_path, "", "empty"), "has no request"),
        (
            written(tmp_path, "arrival_s,input_len\n1,2\n", "lacks"),
            "the header lacks output_len; it has 'arrival_s, input_len'",
        ),
        (written(tmp_path, "TIMESTAMP,GeneratedTokens\nx,2\n", "azure"), "the header lacks ContextTokens; it has"),
        (written(tmp_path, "arrival_s,input_len,output_len\n1,2\n", "short"), "line 2: it has not as many values"),
        (written(tmp_path, "arrival_s,input_len,output_len\n1,2,3\n-1,2,3\n"), "line 3: arrival_s is -1"),
        (written(tmp_path, json.dumps([GOOD]), "list"), "is a JSON list: write each request as an object"),
        (written(tmp_path, '{"a":' * 100_000, "deep"), "line 1: not JSON"),
        (
            written(tmp_path, f'arrival_s,input_len,output_len\n"{"1" * 200_000}",2,3\n', "wide"),
            "not CSV: field larger",
        ),
        (str(tmp_path / "none"), "cannot be read: No such file"),
        (str(tmp_path), "cannot be read"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_trace(path)
        assert words in str(refused.value)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="neither JSON lines nor CSV"):
        read_trace(str(tmp_path / "binary"))
