"""The answer of /v1/requests/{id}/explain, and who gets it. The figures themselves: test_serve_live.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.config.generation import GenerationDefaults
from quire.config.model import read_arch
from quire.core.events import Chunk, EngineReady, Explanation, StepGroup
from quire.engine.expectations import Expectations
from quire.engine.frontend import Frontend
from quire.planner.calibration import FOLDER as FOLDER_OF_FILES

BODY = {"model": "fake", "prompt": [65, 66, 67], "max_tokens": 9}


def test_phases_and_reasons(server: Any) -> None:
    done = httpx.post(server.base + "/v1/completions", json=BODY).json()
    told = httpx.get(f"{server.base}/v1/requests/{done['id']}/explain").json()
    assert told["object"] == "request.explanation"
    [part] = told["parts"]
    assert part["phases"] == [
        {"name": "queue", "from_s": 0.0, "to_s": 0.25}, {"name": "prompt", "from_s": 0.25, "to_s": 0.5},
        {"name": "output", "from_s": 0.5, "to_s": 2.0},
    ]  # fmt: skip
    assert part["reasons"][0].startswith("9 tokens of output took 1.500 s")
    assert any("behind 7 sequences" in reason for reason in part["reasons"])
    assert "The best cached prefix differs at token 1: 'b' here, 'c' there." in part["reasons"]
    assert "tenant" not in part and "label" not in part
    assert part["expectation"] == {"unknown": "the device 'fake' has no steps of its own"}
    assert part["reasons"][-1] == "What it should have taken is not known: the device 'fake' has no steps of its own."


@pytest.mark.parametrize(
    ("places", "did", "said"),
    [
        ([4, 2], (3, 7, 6), "Its output took 3 steps in place of 9: 7 drafts were verified in 3 of them, and 6 kept."),
        ([4, 2], (1, 1, 0), "Its output took 9 steps: 1 draft was verified in 1 of them, and none kept."),
        ([0, 0], (0, 0, 0), "No step of it verified drafts: none were found, or none were expected to pay."),
        ([], (0, 0, 0), None),
    ],
)
def test_what_drafts_did(server: Any, places: list[int], did: tuple[int, int, int], said: str | None) -> None:
    server.engine.drafts, server.engine.drafts_of_one = (9, 20, places, 0.5), did
    done = httpx.post(server.base + "/v1/completions", json=BODY).json()
    [part] = httpx.get(f"{server.base}/v1/requests/{done['id']}/explain").json()["parts"]
    assert (part["n_drafts"], part["draft_tokens"], part["drafts_kept"]) == did
    assert [reason for reason in part["reasons"] if "drafts" in reason or "draft was" in reason] == [said] * bool(said)


def test_a_part_for_each_prompt(server: Any) -> None:
    done = httpx.post(server.base + "/v1/completions", json={**BODY, "prompt": [[1], [2], [3]]})
    name = done.headers["x-request-id"]
    assert len(httpx.get(f"{server.base}/v1/requests/{name}/explain").json()["parts"]) == 3


def test_only_the_key_that_has_sent_it_is_told(make_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(json.dumps({"keys": [{"key": "one", "name": "a"}, {"key": "two", "name": "b"}]}))
    server = make_server(api_key_file=str(path))
    headers = {key: {"authorization": f"Bearer {key}"} for key in ("one", "two")}
    done = httpx.post(server.base + "/v1/completions", json=BODY, headers=headers["one"]).json()
    url = f"{server.base}/v1/requests/{done['id']}/explain"
    assert [httpx.get(url, headers=headers[key]).status_code for key in ("one", "two")] == [200, 404]


def expectations(
    device: str, device_name: str = "", calibration: Path | None = None, shape: str = "llama-3.1-8b", **options: Any
) -> Expectations:
    """Of an engine of the shape on such a device."""
    ready = EngineReady(8192, 4096, page_size=16, logits_width=128256, device=device, device_name=device_name)
    arch = read_arch(FOLDER / shape)
    frontend = Frontend(EngineConfig(**options), "8b", None, None, GenerationDefaults((), {}), engine=ready, arch=arch)
    found = Expectations(frontend)
    if calibration is not None:
        found.calibrate(calibration)
    return found


ONE = Explanation(
    "a-0", "", 1024, 1, admitted_s=0.0, first_token_s=0.0232, ended_s=0.123, end="length", n_outputs=11, n_first=1,
    chunks=[Chunk(0, 0.0, 0, 1024, 0)],
    steps=[StepGroup(0.0232, 1, 1, 1023, 1, 1, 0.0), StepGroup(0.1232, 10, 8, 4090, 1, 1, 8200.0)],
)  # fmt: skip


def test_what_it_should_have_taken_on_a_device_that_was_measured() -> None:
    found = expectations("cuda", "NVIDIA H200").of(ONE)
    assert found["unknown"] is None and found["device"] == "h200" and 0.05 < found["error"] < 0.15
    first, later = found["first_token"], found["later_token"]
    assert abs(first["rest_s"]) < 0.05 * first["expected_s"] and first["queue_s"] == 0
    assert later["alone_s"] < 0.005 < later["prompts_s"] and later["n_tokens"] == 10
    total = sum(later[f"{name}_s"] for name in ("alone", "sequences", "prompts", "rest"))
    assert math.isclose(total, later["took_s"]) and math.isclose(later["took_s"], 0.00998)
    assert found["words"][0].startswith("The first token took 23.2 ms; 2") and found["words"][0].endswith(" ms.")
    assert "prompts of others" in found["words"][1] and f"± {100 * found['error']:.0f} %" in found["words"][1]


def recorded_error(kind: str) -> float:
    """Of runs on record that are of this kind and nothing else."""
    records = json.loads((FOLDER_OF_FILES / "h200.json").read_text())["records"]
    return next(float(one["error"]) for one in records if one["kinds"] == [kind])


def test_stages_are_in_what_it_should_have_taken() -> None:
    """Two of them compute a prompt no sooner, where it is one chunk; the bar is that of runs with stages."""
    alone, staged = (expectations("cuda", "NVIDIA H200", pipeline_parallel_size=n).of(ONE) for n in (1, 2))
    assert staged["unknown"] is None and staged["error"] == max(alone["error"], recorded_error("stages (pp)"))
    assert math.isclose(staged["first_token"]["alone_s"], alone["first_token"]["alone_s"], rel_tol=0.02)


def test_experts_are_read_as_the_engine_has_counted() -> None:
    """Where all rows choose the same eight of 128, eight streams read no more of them than one."""
    made = expectations("cuda", "NVIDIA H200", shape="qwen3-30b-a3b")
    even, hot, cold = bytes([16] * 128), bytes([255] * 8 + [0] * 120), bytes(128)
    of = {
        name: made.of(ONE, [layer] * 48)["later_token"]
        for name, layer in (("even", even), ("hot", hot), ("cold", cold))
    }
    assert of["cold"] == made.of(ONE)["later_token"], "nothing was counted yet"
    assert math.isclose(of["even"]["expected_s"], of["cold"]["expected_s"], rel_tol=1e-6)
    assert of["hot"]["sequences_s"] < 0.2 * of["even"]["sequences_s"]
    assert math.isclose(of["hot"]["alone_s"], of["even"]["alone_s"], rel_tol=0.01), "one row reads eight either way"
    assert made.of(ONE, [even] * 48)["later_token"] == of["even"], "what was counted last holds"


@pytest.mark.parametrize(
    ("device", "name", "options", "why"),
    [
        ("cuda", "NVIDIA L4", {}, "steps were never timed on NVIDIA L4; `quire bench calibrate` measures them"),
        ("cpu", "", {}, "steps were never timed on this CPU"),
        ("null", "", {}, "the device 'null' has no steps of its own"),
        ("cpu", "", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "knows no drafts"),
        ("cpu", "", {"calibration": FOLDER_OF_FILES / "h200.json"}, "the calibration is of h200, and the engine"),
    ],
)
def test_where_nothing_is_known_no_number_is_shown(device: str, name: str, options: dict[str, Any], why: str) -> None:
    found = expectations(device, name, **options).of(ONE)
    assert found.keys() == {"unknown", "words"} and why in found["unknown"] and why in found["words"][0]
