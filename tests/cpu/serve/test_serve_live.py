"""`quire serve` as a process on the bundled model: start, answers, faults, signals. transformers is the oracle."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "quire" / "_models" / "demo"

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the bundled model")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """One `quire serve`."""

    def __init__(self, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "quire", "serve", "--port", str(self.port), "--num-threads", "1"]
        command += ["--num-gpu-blocks-override", "600", *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def wait_ready(self, limit_s: float = 200) -> float:
        began_s = time.monotonic()
        while time.monotonic() - began_s < limit_s:
            assert self.process.poll() is None, self.output()
            try:
                answer = httpx.get(self.base + "/health", timeout=5)
                if answer.status_code == 200:
                    return time.monotonic() - began_s
                assert answer.status_code == 503 and answer.headers["retry-after"], "loading is a 503"
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError("the server did not get ready")

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1
        return children[0]

    def wait(self, limit_s: float) -> int:
        return self.process.wait(limit_s)

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


@pytest.fixture(scope="module")
def live() -> Iterator[Process]:
    process = Process()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(*flags: str, port: int | None = None) -> Process:
        made.append(Process(*flags, port=port))
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.fixture
def client(live: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.base + "/v1", api_key="none", max_retries=0)


def stats(live: Process) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(live.base + "/v1/engine").json()["stats"]
    return found


def wait_idle(live: Process, limit_s: float = 60) -> dict[str, Any]:
    deadline_s = time.monotonic() + limit_s
    while True:
        found = stats(live)
        if found["n_running"] == found["n_waiting"] == 0 and found["n_pages_free"] == found["n_pages"]:
            return found
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)


def test_prompt_log_likelihoods_are_those_of_transformers(client: openai.OpenAI) -> None:
    """The request that lm-eval's `local-completions` sends, and the sum that it takes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    texts = [("import os", "\nimport sys\n"), ("def add(a, b):", "\n    return a + b"), ("What is 2 + 2?", " 4")]
    encoded = [(tokenizer(a)["input_ids"], tokenizer(b, add_special_tokens=False)["input_ids"]) for a, b in texts]
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model="demo", prompt=[a + b for a, b in encoded], echo=True, logprobs=1, max_tokens=max_tokens
        )
        for choice, (context, target) in zip(answer.choices, encoded, strict=True):
            assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
            end = len(context) + len(target)
            got = choice.logprobs.token_logprobs[len(context) : end]
            with torch.no_grad():
                rows = oracle(torch.tensor([context + target])).logits[0].log_softmax(-1)
            expected = [float(rows[len(context) + i - 1, token]) for i, token in enumerate(target)]
            assert len(got) == len(expected)
            # The server computes in bfloat16, the checkpoint's type.
            assert math.isclose(sum(got), sum(expected), rel_tol=0.05, abs_tol=0.15), (got, expected)


def test_stream_equals_whole_and_seed_repeats(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "demo", "prompt": "def main():\n", "max_tokens": 40, "seed": 7, "n": 2}
    whole = client.completions.create(**arguments)
    texts = ["", ""]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_beam_search(client: openai.OpenAI, live: Process) -> None:
    """The best of `best_of` beams; those of a text are found again by its log-probabilities, streamed or not."""
    arguments: dict[str, Any] = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12, "n": 2}
    beams: dict[str, Any] = {"use_beam_search": True, "length_penalty": 0.0}
    found = client.completions.create(**arguments, best_of=4, logprobs=0, extra_body=beams)
    sums = [sum(choice.logprobs.token_logprobs) for choice in found.choices]  # type: ignore[union-attr, arg-type]
    greedy = client.completions.create(**{**arguments, "n": 1}, temperature=0, logprobs=0)
    assert sums == sorted(sums, reverse=True) and len({choice.text for choice in found.choices}) == 2
    assert sums[0] >= sum(greedy.choices[0].logprobs.token_logprobs) - 0.1  # type: ignore[union-attr, arg-type]
    texts = ["", ""]
    for chunk in client.completions.create(**arguments, best_of=4, stream=True, extra_body=beams):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in found.choices]
    messages: Any = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = client.chat.completions.create(model="demo", messages=messages, n=3, max_tokens=8, extra_body=beams)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    wait_idle(live)


def test_chat_and_cached_tokens(client: openai.OpenAI, live: Process) -> None:
    system = {"role": "system", "content": "Answer briefly. " * 10}
    messages: Any = [system, {"role": "user", "content": "What is 17 + 25?"}]
    first = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    wait_idle(live)
    again = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_client_frees_its_pages(live: Process, stream: bool) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": stream, "n": 2}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    aborted = stats(live)["finished"].get("abort", 0)
    connections = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(4)]
    for connection in connections:
        connection.sendall(head.encode() + data)
    deadline_s = time.monotonic() + 60
    while (found := stats(live))["n_running"] + found["n_waiting"] < 8:  # else a request ends before it began
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)
    for connection in connections:
        connection.close()
    assert wait_idle(live)["finished"]["abort"] == aborted + 8


def test_metrics_follow_the_engine(live: Process, client: openai.OpenAI) -> None:
    text = httpx.get(live.base + "/metrics").text
    assert 'quire:generation_tokens_total{model_name="demo"}' in text
    assert "quire:time_to_first_token_seconds_bucket" in text


def test_taken_port_is_said_at_once(live: Process, start: Callable[..., Process]) -> None:
    second = start(port=live.port)
    assert second.wait(60) == 2  # before any model is loaded: see its output
    output = second.output()
    assert f"port {live.port}" in output and "in use" in output and "Traceback" not in output


@pytest.mark.parametrize("flags", [(), ("--api-processes", "2")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_loads(
    start: Callable[..., Process], flags: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    process = start(*flags)
    assert process.process.stdout is not None
    while "loading torch\n" not in (line := process.process.stdout.readline()) or line.startswith("quire:"):
        assert line, "it ended before it loaded anything"
    process.process.send_signal(number)
    assert process.wait(60) == code
    assert "Traceback" not in process.output()


def test_an_idle_server_says_what_it_does(start: Callable[..., Process]) -> None:
    process = start()
    assert process.process.stdout is not None
    assert process.process.stdout.readline() == "quire: starting the server, then loading torch and the demo model\n"
    process.wait_ready()
    process.process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    lines = process.output().splitlines()
    said = [line for line in lines if line.startswith("Quire")]
    assert [line.split()[1] for line in said] == ["serves", "shuts"] and "shuts down" in said[1]
    steps = ("loading torch", "torch is loaded", "KV pool")
    order = [next(i for i, line in enumerate(lines) if step in line) for step in steps]
    assert order == sorted(order)


def test_empty_keys_are_refused(start: Callable[..., Process]) -> None:
    for key in ("", "  ", "schlüssel"):
        process = start("--api-key", key)
        assert process.wait(60) == 2
        output = process.output()  # an empty value is refused by the command line, whatever the option
        assert "API key" in output or "is empty: give a value" in output


def test_unusable_certificates_are_refused(start: Callable[..., Process], tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("not PEM")
    process = start("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    assert process.wait(60) == 2
    output = process.output()
    assert "--ssl-certfile" in output and "Traceback" not in output


def test_sigterm_lets_requests_finish(start: Callable[..., Process]) -> None:
    process = start("--shutdown-timeout", "300")
    process.wait_ready()
    engine = process.engine()
    body = {"model": "demo", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as http, http.stream("POST", process.base + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = httpx.post(process.base + "/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert httpx.get(process.base + "/health").status_code == 503
        assert "data: [DONE]" in list(lines)
    assert process.wait(60) == 0
    output = process.output()
    assert f"Quire serves demo at {process.base}" in output and "Traceback" not in output
    assert not engine.is_running()


def test_second_ctrl_c_cuts_off(start: Callable[..., Process]) -> None:
    process = start()
    process.wait_ready()
    engine = process.engine()
    body = {"model": "demo", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.Client(timeout=60) as http, http.stream("POST", process.base + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.killpg(process.process.pid, signal.SIGINT)  # as a terminal does: the engine's process gets it too
        time.sleep(0.2)
        os.killpg(process.process.pid, signal.SIGINT)
        frames = [line for line in lines if line.startswith("data: ")]
    assert json.loads(frames[-1][6:])["error"]["code"] == "draining"
    assert process.wait(60) == 130
    assert "Traceback" not in process.output()
    assert not engine.is_running()


def test_an_explanation_says_where_the_time_went(live: Process) -> None:
    text = "The pages of this book are numbered from the first to the last, and none is missing. " * 8
    asked = []
    for prompt in (text, text + "But", text[:200] + "quite different" + text[200:]):
        body = {"model": "demo", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "user": "me"}
        asked.append(httpx.post(live.base + "/v1/completions", json=body))
    parts = []
    for answer in asked:
        for name in (answer.json()["id"], answer.headers["x-request-id"]):
            told = httpx.get(f"{live.base}/v1/requests/{name}/explain")
            assert told.status_code == 200, told.text
        [part] = told.json()["parts"]
        times = [0, part["admitted_s"], part["first_token_s"], part["ended_s"]]
        assert times == sorted(times) and [phase["name"] for phase in part["phases"]] == ["queue", "prompt", "output"]
        assert sum(chunk["length"] for chunk in part["chunks"]) == part["prompt_len"] - part["n_cached"]
        assert sum(group["n_steps"] for group in part["steps"]) == len(part["chunks"]) + 19
        assert part["n_outputs"] == 20 and part["end"] == "length" and len(part["reasons"]) >= 3
        parts.append(part)
    assert parts[0]["n_cached"] < parts[1]["n_cached"]
    assert parts[2]["miss_wanted"] != parts[2]["miss_cached"] and "differs at token" in str(parts[2]["reasons"])
    for name in ("cmpl-" + "0" * 24, "..", "a" * 5000, "cmpl-" + "0" * 23):
        assert httpx.get(f"{live.base}/v1/requests/{name}/explain").status_code in (404, 431)


BODY = {"model": "demo", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}


def kill_engine_in_a_stream(process: Process) -> dict[str, Any]:
    """Kills the engine once a stream runs; the stream's last event, which comes soon."""
    with httpx.Client(timeout=60) as http, http.stream("POST", process.base + "/v1/completions", json=BODY) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.engine().kill()
        frames = [line for line in lines if line.startswith("data: ")]
    found: dict[str, Any] = json.loads(frames[-1][6:])
    return found


WAIT_WHILE = """
import os, time
while os.path.exists(os.environ["QUIRE_TEST_WAIT_WHILE"]) and os.getppid() != 1:
    time.sleep(0.01)
"""


def test_killed_engine_is_started_again(
    start: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream ends with an error; what has sent nothing runs again; new requests are refused meanwhile, which
    lasts as long as the test wants."""
    (tmp_path / "sitecustomize.py").write_text(WAIT_WHILE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("QUIRE_TEST_WAIT_WHILE", str(tmp_path / "held"))
    process = start()
    process.wait_ready()
    whole = {"model": "demo", "prompt": "def add", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    golden = httpx.post(process.base + "/v1/completions", json=whole, timeout=60).json()["choices"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(httpx.post, process.base + "/v1/completions", json=whole, timeout=60)
        while not waiting.done() and not httpx.get(process.base + "/v1/load").json()["num_requests_running"]:
            time.sleep(0.01)
        (tmp_path / "held").touch()
        assert kill_engine_in_a_stream(process)["error"]["code"] == "engine_lost"
        health = httpx.get(process.base + "/health")
        assert health.status_code == 503 and health.headers["retry-after"]
        assert health.json()["error"]["code"] == "engine_lost"
        refused = httpx.post(process.base + "/v1/completions", json=whole)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_lost"
        (tmp_path / "held").unlink()
        assert waiting.result().json()["choices"] == golden
    process.wait_ready()
    assert httpx.post(process.base + "/v1/completions", json=whole, timeout=60).json()["choices"] == golden


def test_killed_engine_ends_the_server_if_it_may_not_start_again(start: Callable[..., Process]) -> None:
    process = start("--max-engine-restarts", "0")
    process.wait_ready()
    assert kill_engine_in_a_stream(process)["error"]["code"] in {"engine_lost", "engine_dead"}
    assert process.wait(60) == 1


def test_killed_server_takes_its_engine_along(live: Process) -> None:
    """Last in this file: it ends the server that the other tests share."""
    orphan = live.engine()
    live.process.kill()
    orphan.wait(60)
    assert not orphan.is_running()
