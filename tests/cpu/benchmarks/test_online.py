"""The online benchmark: its arithmetic on made-up streams, and a whole run against a tiny model."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.online import stall_row, stall_summary
from benchmarks.served import free_port, served
from quire.bench.client import ClientTrace
from quire.core.errors import EngineError

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SERVE = ["--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu", "--num-threads", "1"]


def stream(*times_s: float) -> ClientTrace:
    return ClientTrace(chunk_times_s=list(times_s))


def test_gaps_beside_the_prompt_are_those_that_overlap_its_prefill() -> None:
    prompt = ClientTrace(start_s=1.0, chunk_times_s=[1.5])
    streams = [
        stream(0.1, 0.2, 0.3, 0.9, 1.2, 1.2, 1.6, 1.7),  # before: 100, 600; two chunks in one read are one arrival
        stream(0.05, 0.95, 1.55, 1.56),  # its gap that began before the streams settled is not counted
    ]
    row = stall_row(streams, 0.15, prompt)
    assert row["before_ms"] == pytest.approx([100, 600])
    assert row["during_ms"] == pytest.approx([300, 400, 600])
    figures = stall_summary([row], 2)
    assert figures["median_step_ms"] == pytest.approx(350) and figures["p99_gap_during_ms"] == pytest.approx(596)
    assert figures["ratio"] == pytest.approx(596 / 350) and figures["is_within_limit"] is True
    assert figures["max_gap_during_ms"] == pytest.approx(600) and figures["median_prompt_ttft_ms"] == pytest.approx(500)
    row["before_ms"] = [290.0]
    assert stall_summary([row], 2)["is_within_limit"] is False


def test_a_server_that_fails_is_reported_and_one_that_does_not_answer_is_stopped(tmp_path: pathlib.Path) -> None:
    log, port = tmp_path / "log", str(free_port())
    failing = [sys.executable, "-c", "import sys; sys.exit('no such model')", "--port", port]
    with pytest.raises(EngineError, match=r"ended with 1: no such model"), served(failing, log, 20.0):
        pass
    silent = [sys.executable, "-c", "import time; time.sleep(60)", "--port", port]
    begin_s = time.monotonic()
    with pytest.raises(EngineError, match=r"not healthy within 0\.3 s"), served(silent, log, 0.3):
        pass
    assert time.monotonic() - begin_s < 10


@pytest.fixture
def command(tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "lengths.json").write_text(json.dumps({"input": [5, 40, 17], "output": [90, 40, 200]}))
    options = {
        "--model": tmp_path, "--lengths": tmp_path / "lengths.json", "--output": tmp_path / "online.json",
        "--starts": 1, "--capacity-requests": 6, "--fractions": 0.5, "--seconds": 0.5, "--stall-streams": 3,
        "--stall-context": 8, "--stall-prompt": 600, "--stall-output": 60000, "--stall-repeats": 1,
        "--vocab-size": 1000,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "benchmarks.online", *words, "--", *SERVE]


def test_a_run_measures_every_part(command: list[str], tmp_path: pathlib.Path) -> None:
    begin_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    run_s = time.monotonic() - begin_s
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "online.json").read_text())
    results = report["results"]
    assert results["is_complete"] and report["commit"] and report["hardware"]["cpu"]
    assert report["command"].startswith("benchmarks.online --model")
    (start,) = results["starts"]
    assert 0 < start["healthy_s"] < start["first_token_s"] < run_s
    offline, (rate,), stall = results["offline"], results["rates"], results["stall"]
    assert offline["completed"] == 6 and offline["total_output_tokens"] == 660
    assert results["capacity_requests_per_s"] == offline["request_throughput"]
    assert rate["request_rate"] == pytest.approx(0.5 * offline["request_throughput"]) and rate["failed"] == 0
    for part in (offline, rate):
        assert 0 < part["p50_ttft_ms"] <= part["p50_e2el_ms"] <= part["p99_e2el_ms"] < 1000 * run_s
        assert part["p50_ttft_ms"] <= part["p99_ttft_ms"] <= part["p99_e2el_ms"]
        # The shortest answer has 40 tokens.
        assert 39 * part["p50_tpot_ms"] < part["p99_e2el_ms"] and part["p99_itl_ms"] <= part["p99_e2el_ms"]
    # Tokens come one at a time although there is no text. A client that had to wait reads all of a request at once, but
    # not those of every request.
    assert max(offline["p99_tpot_ms"], rate["p99_tpot_ms"]) > 0 and max(offline["p99_itl_ms"], rate["p99_itl_ms"]) > 0
    assert stall["n_streams"] == 3 and stall["n_gaps_before"] >= 3 and stall["n_gaps_during"] >= 3
    assert stall["ratio"] == pytest.approx(stall["p99_gap_during_ms"] / stall["median_step_ms"])


def test_a_run_that_is_ended_stops_its_server(command: list[str], tmp_path: pathlib.Path) -> None:
    command[command.index("--seconds") + 1] = "600"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("stall"):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143
    finally:
        process.kill()
    assert json.loads((tmp_path / "online.json").read_text())["results"]["is_complete"] is False
    assert not servers_of(tmp_path)


def servers_of(folder: pathlib.Path) -> list[str]:
    """Command lines of processes that name `folder`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_text()
        except OSError:
            continue
        if str(folder) in words and int(entry.parent.name) != os.getpid():
            found.append(words)
    return found
