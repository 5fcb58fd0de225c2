"""Grammars that ended servers, through every route of a live server: 400 for each, and the canary's bytes after it."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from test_serve_live import MODEL, Process

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the bundled model")
CHAIN = 6000
SCHEMA = {
    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(CHAIN)} | {f"d{CHAIN}": {"type": "null"}},
    "$ref": "#/$defs/d0",
}
FORCED = '%ignore /a+/\nstart: "a" "a"'
FOLLOWED = '%ignore / +/\nstart: /[b-d]{3}/ " " /x/'
RULES = "\n".join(f"r{i}: r{i + 1}" for i in range(CHAIN)) + f'\nr{CHAIN}: "x"\nstart: r0'
HI: Any = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (CHAT, {"messages": HI, "response_format": JSON_SCHEMA}),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "structural_tag": (CHAT, {"messages": HI, "response_format": TAG}),
    "rules": (TEXT, {"prompt": "Hi", "structured_outputs": {"grammar": RULES}}),
    "forced": (TEXT, {"prompt": "Hi", "guided_grammar": FORCED}),
    "followed": (TEXT, {"prompt": "Hi", "guided_grammar": FOLLOWED}),
    "streamed": (CHAT, {"messages": HI, "structured_outputs": {"grammar": FOLLOWED}, "stream": True}),
}
CANARY = {"model": "demo", "prompt": "Yes or no:", "max_tokens": 8, "temperature": 0, "guided_choice": ["yes", "no"]}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("data")
    process = Process(
        "--served-model-name", "demo", "--structured-outputs-compile-seconds", "1", "--data-dir", str(folder)
    )
    process.wait_ready()
    yield process
    process.stop()


def canary(live: Process) -> str:
    answer = httpx.post(live.base + TEXT, json=CANARY, timeout=120)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    assert text in ("yes", "no")
    return str(text)


@pytest.mark.parametrize(("path", "body"), CASES.values(), ids=CASES.keys())
def test_chains_and_loops_end_no_process(live: Process, path: str, body: dict[str, Any]) -> None:
    before = canary(live)
    children = {child.pid for child in psutil.Process(live.process.pid).children()}
    for _ in range(2):
        answer = httpx.post(live.base + path, json={"model": "demo", **body}, timeout=120)
        assert answer.status_code == 400 and "constrained by this schema or grammar" in answer.text, answer.text
    assert canary(live) == before
    assert {child.pid for child in psutil.Process(live.process.pid).children()} == children, "the engine was replaced"


def test_a_batch_line_that_ends_its_trial_is_one_bad_line(live: Process, tmp_path: Path) -> None:
    bodies = [{"response_format": JSON_SCHEMA}, {}, {"structured_outputs": {"grammar": FOLLOWED}}]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": CHAT,
         "body": {"model": "demo", "messages": HI, "max_tokens": 4, **body}}
        for i, body in enumerate(bodies)
    ]  # fmt: skip
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with httpx.Client(base_url=live.base, timeout=120) as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": path.open("rb")}).json()
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=wanted).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            time.sleep(0.2)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        assert batch["status"] == "completed" and batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    canary(live)


def test_a_small_choice_does_not_wait_behind_large_schemas(live: Process) -> None:
    """Twelve clients with schemas of thousands of properties: another's choice is answered, and no good schema is
    called a bad one because the compiler is busy."""

    def heavy(number: int) -> httpx.Response:
        names = [f"property_{number}_{i}" for i in range(4500)]
        schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": names}
        body = {"model": "demo", "messages": HI, "max_tokens": 4}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return httpx.post(live.base + CHAT, json={**body, "response_format": form}, timeout=300)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(heavy, number) for number in range(12)]
        time.sleep(0.5)
        n_before = sum(answer.done() for answer in answers)
        canary(live)
        n_after = sum(answer.done() for answer in answers)
        assert n_before <= n_after < 12, "the choice came after all schemas"
        for answer in answers:
            response = answer.result()
            assert response.status_code in (200, 503) or "s to compile" in response.text, response.text
            if response.status_code == 503:
                assert response.json()["error"]["code"] == "grammars_busy" and response.headers["retry-after"]
    canary(live)
