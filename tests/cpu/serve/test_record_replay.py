"""Traffic that one server recorded, sent again to another: number, lengths, timing, shared beginnings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from quire.bench.options import ReplayOptions
from quire.bench.replay import read_record, replay
from quire.core.errors import ConfigError
from quire.serve.ops.recorder import MARK_TOKENS, Recorder

TIMER_S = 0.005
"""A timer of the event loop may be so early."""
COMMON = list(range(40, 40 + 3 * MARK_TOKENS))


def wait_lines(path: Path, n: int) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + 60
    while path.read_text().count("\n") < n and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("with_prompts", [False, True])
def test_a_record_is_repeated(make_server: Any, tmp_path: Path, with_prompts: bool) -> None:
    path = tmp_path / "traffic.jsonl"
    server = make_server(record=str(path), record_prompts=with_prompts)
    sent = [COMMON + [1] * 5, COMMON + [2] * 70, [7] * 9]
    with httpx.Client(base_url=server.base) as http:
        for i, prompt in enumerate(sent):
            body = {"model": "fake", "prompt": prompt, "max_tokens": 4 + i, "stream": bool(i % 2)}
            assert http.post("/v1/completions", json=body).status_code == 200
            time.sleep(0.2)
    lines = wait_lines(path, 3)
    assert [(line["n_output"], line["prompts"][0]["length"]) for line in lines] == [(4, 101), (5, 166), (6, 9)]
    assert ("token_ids" in path.read_text()) == with_prompts
    other = make_server()
    run = uvloop.run(replay(str(path), ReplayOptions(base_url=other.base, speed=2.0, vocab_size=200)))
    assert run.explained.line == "expected: not known, as the server says: the device 'fake' has no steps of its own"
    assert [trace.error for trace in run.traces] == [""] * 3
    assert [trace.n_output for trace in run.traces] == [4, 5, 6]
    due_s = [trace.scheduled_s - run.traces[0].scheduled_s for trace in run.traces]
    assert due_s == pytest.approx([(line["at_s"] - lines[0]["at_s"]) / 2 for line in lines], abs=1e-3)
    assert 0 < due_s[1] < due_s[2] and all(trace.start_s > trace.scheduled_s - TIMER_S for trace in run.traces)
    got = [request.prompt_token_ids for request in other.engine.submitted]
    assert [len(prompt) for prompt in got] == [101, 166, 9]
    assert got[0][: len(COMMON)] == got[1][: len(COMMON)] and got[0][len(COMMON) :] != got[1][len(COMMON) : 101]
    assert (got == sent) == with_prompts


def test_marks_say_nothing_without_the_secret(tmp_path: Path) -> None:
    one, other = (Recorder(str(tmp_path / name), False)._prompt(COMMON).marks for name in "ab")
    assert len(one) == 3 and one != other


def test_a_full_disk_costs_lines_only(make_server: Any) -> None:
    server = make_server(record="/dev/full")
    for _ in range(30):
        body = {"model": "fake", "prompt": [1, 2], "max_tokens": 2}
        assert httpx.post(server.base + "/v1/completions", json=body).status_code == 200


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(str(tmp_path / "absent"), 100)
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(ConfigError, match="not what"):
        read_record(str(tmp_path / "bad"), 100)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="no request"):
        read_record(str(tmp_path / "empty"), 100)
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(str(tmp_path / "no" / "folder"), False)
