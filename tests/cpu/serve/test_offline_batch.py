"""`quire run-batch` on the bundled model, and its order, limits and failures on the fake engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import FakeEngine, byte_tokenizer, make_llm, reply_to
from test_http_batches import line

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError
from quire.serve.batch import offline as offline_batch
from quire.serve.batch.offline import run_batch

MODEL = Path(__file__).resolve().parents[3] / "quire" / "_models" / "demo"


def answers(source: Path, target: Path, concurrency: int = 8, **faults: Any) -> tuple[Any, list[dict[str, Any]]]:
    async def load(config: EngineConfig) -> Any:
        engine = FakeEngine()
        for name, value in faults.items():
            setattr(engine, name, value)
        return await make_llm(engine)

    summary = run_batch(EngineConfig(), str(source), str(target), concurrency, load)
    return summary, list(map(json.loads, target.read_text().splitlines()))


def test_lines_come_in_order_and_broken_ones_stay_in_place(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = [40 if i % 10 == 0 else 2 for i in range(100)]
    good = [line(f"{i}", {"model": "fake", "prompt": f"p{i}", "max_tokens": n}) for i, n in enumerate(lengths)]
    source.write_bytes(b"\n" + b"".join(good) + b"broken\n\n" + line("5") + line("x", url="/health"))
    summary, rows = answers(source, target, 8, delay_s=0.001)
    assert (summary.n_answered, summary.n_failed) == (100, 3) and len(rows) == 103
    for i, row in enumerate(rows[:100]):
        text = row["response"]["body"]["choices"][0]["text"]
        assert row["custom_id"] == str(i) and text == reply_to(byte_tokenizer().encode(f"p{i}"))[: lengths[i]]
    assert [row["error"]["code"] for row in rows[100:]] == ["invalid_json", "duplicate_custom_id", "invalid_value"]
    assert summary.first_reason == rows[100]["error"]["message"] and summary.first_reason.startswith("line 102: ")
    assert rows[101]["error"]["message"] == "line 104: line 7 has this custom_id already."


def test_a_fault_of_one_line_is_its_own(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(f"{i}") for i in range(20)))
    summary, rows = answers(
        source, target, fault=lambda request: request.prompt_token_ids == byte_tokenizer().encode("7")
    )
    assert summary.first_reason == "custom_id '7': The engine failed while it computed this sequence."
    assert summary.n_failed == 1 and rows[7]["response"]["status_code"] == 500
    assert all(row["response"]["status_code"] == 200 for row in rows if row["custom_id"] != "7")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(line("a"))
    with pytest.raises(ConfigError, match="No such file"):
        answers(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="No such file"):
        answers(source, tmp_path / "none" / "out")
    with pytest.raises(ConfigError, match="the same"):
        answers(source, source)
    assert source.read_bytes() == line("a")
    with pytest.raises(EngineError, match="No space left"):
        answers(source, Path("/dev/full"))


@pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the bundled model")
def test_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 16}
    source.write_bytes(line("sum", {**body, "temperature": 0}, "/v1/chat/completions") + b"{\n")
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target), "--num-threads", "1"]
    run = subprocess.run([*command, "--num-gpu-blocks-override", "200"], capture_output=True, text=True, check=False)
    said = f"""1 line answered, 1 failed
the first that failed: line 2: The body is not valid JSON: Input data was truncated.
all answers and reasons are in {target}
"""
    assert run.returncode == 0 and run.stderr.endswith(said), run.stderr
    rows = list(map(json.loads, target.read_text().splitlines()))
    assert "42" in rows[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert subprocess.run(command[:6], capture_output=True, check=False).returncode == 2


def test_what_is_read_ahead_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lines come a few at a time, a line beyond all limits too, and each has its output in its place."""
    monkeypatch.setattr(offline_batch, "MAX_AHEAD_BYTES", 1_000_000)
    monkeypatch.setattr(offline_batch, "READ_BYTES", 100_000)
    most = [0]

    async def ask(run: Any, path: str, body: bytes, tenant: Any) -> Any:
        open_bytes[0] += len(body)
        most[0] = max(most[0], open_bytes[0])
        try:
            return await real(run, path, body, tenant)
        finally:
            open_bytes[0] -= len(body)

    real, open_bytes = offline_batch.ask, [0]
    monkeypatch.setattr(offline_batch, "ask", ask)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"{i}" for i in range(12)]
    body = {"model": "fake", "prompt": "x", "max_tokens": 2, "padding": "y" * 400_000}
    endless = line("endless")[:-1] + b" " * 17_000_000
    blank = b" " * 17_000_000
    lines = [*(line(name, body)[:-1] for name in names), endless, blank, line("last")[:-1], line("0")[:-1]]
    source.write_bytes(b"\n".join(lines))
    summary, rows = answers(source, target, 8)
    assert [row["custom_id"] for row in rows] == [*names, None, "last", "0"]
    codes = [row["error"]["code"] for row in rows if row["error"] is not None]
    assert codes == ["line_too_long", "duplicate_custom_id"] and summary.n_answered == 13
    assert 400_000 < most[0] < 1_900_000, "more than the limit and a line"
