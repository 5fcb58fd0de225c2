"""Run as `python -O optimised.py`: what guards the server must not be an `assert`, which -O removes.

A script without pytest, whose own asserts would vanish too. Prints one line for each check that failed; the exit status
is 1 if any did.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from serve_fakes import LOGITS_WIDTH, MAX_MODEL_LEN, FakeEngine, make_llm

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError, QuireError
from quire.core.request import Request
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.serve.app import ROUTES, App
from quire.serve.config import ServerConfig
from quire.serve.state import ServerState

KEY = "open-sesame"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHECKS: list[tuple[str, bool]] = []


def expect(name: str, condition: bool) -> None:
    CHECKS.append((name, condition))


def raises(kind: type[Exception], work: Callable[[], object]) -> bool:
    try:
        work()
    except kind:
        return True
    return False


async def status_of(
    app: App, method: str, path: str, body: bytes = b"", *, key: str | None = KEY, host: str = "localhost"
) -> int:
    """The status of one exchange over ASGI."""
    headers = [(b"host", host.encode()), (b"content-type", b"application/json")]
    headers += [(b"content-length", str(len(body)).encode())] if body else []
    headers += [(b"authorization", f"Bearer {key}".encode())] if key is not None else []
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers,
             "query_string": b"", "root_path": ""}  # fmt: skip
    statuses, sent = [], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if sent.is_set():  # the client stays until it is answered
            await asyncio.Event().wait()
        sent.set()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def refused_bodies() -> Iterator[tuple[str, dict[str, Any] | bytes]]:
    text = {"model": "fake", "prompt": "x", "max_tokens": 2}
    for field, value in (
        ("temperature", -1), ("top_p", 2), ("n", 0), ("n", 10**9), ("seed", 2**70), ("max_tokens", -1),
        ("prompt", []), ("prompt", [LOGITS_WIDTH]), ("prompt", [-1]), ("prompt", [1] * (MAX_MODEL_LEN + 1)),
        ("stop", ["x"] * 65), ("logprobs", 10**6), ("logit_bias", {str(LOGITS_WIDTH): 1}), ("priority", 3),
        ("num_beams", 4), ("guided_json", {"type": 5}), ("cache_salt", "x" * 300), ("user", "a\nb"),
    ):  # fmt: skip
        yield TEXT, {**text, field: value}
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for field, value in (
        ("messages", []), ("messages", [{"role": "robot", "content": "x"}]), ("tools", [tool]), ("tools", [tool, tool]),
        ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"messages": 1}), ("tool_choice", "required"),
    ):  # fmt: skip
        yield CHAT, {**chat, field: value}
    responses, message = {"model": "fake", "input": "x"}, {**chat}
    for field, value in (("store", True), ("input", []), ("input", [{"type": "x"}]), ("max_output_tokens", 0)):
        yield "/v1/responses", {**responses, field: value}
    for field, value in (("messages", []), ("max_tokens", 0), ("temperature", 2), ("system", 5)):
        yield "/v1/messages", {**message, field: value}
    for field, value in (("input", []), ("input", [-1]), ("dimensions", 4), ("pooling", "x")):
        yield "/v1/embeddings", {**responses, field: value}
    for broken in (b"{", b"[" * 100_000, b'{"model": "fake", "prompt": "\xff"}', b"null", b" "):
        yield TEXT, broken


async def check_server() -> None:
    config = ServerConfig(port=0, api_key=KEY, max_body_bytes=1 << 20)
    config.verify()
    state = ServerState(config)
    llm = await make_llm(FakeEngine())
    state.attach(llm)
    app = App(state)
    good = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 2}).encode()
    expect("a good request is answered", await status_of(app, "POST", TEXT, good) == 200)
    routes = [(method, path) for method, path, _ in ROUTES if path not in ("/health", "/ping")] + [("GET", "/nothing")]
    for key in (None, "", "wrong", KEY + "x", KEY[:-1]):
        for method, path in routes:
            expect(f"{method} {path} with key {key!r}", await status_of(app, method, path, good, key=key) == 401)
    expect("a host with a slash", await status_of(app, "GET", "/version", host="a/b") == 400)
    expect("a body that is too long", await status_of(app, "POST", TEXT, b" " * (1 << 20) + good) == 413)
    for path, body in refused_bodies():
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        expect(f"{path} {data[:90]!r}", await status_of(app, "POST", path, data) == 400)
    state.close()
    await llm.shutdown()


def check_options() -> None:
    for options in ({"api_key": ""}, {"api_key": "a b"}, {"port": 70_000}, {"ssl_certfile": "/nothing"}):
        expect(f"options {options}", raises(ConfigError, lambda options=options: ServerConfig(**options).verify()))


def check_scheduler() -> None:
    config = SchedulerConfig(
        n_pages=9, page_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_num_waiting=2
    )
    scheduler = Scheduler(config, VirtualClock())

    def submit(name: str, prompt: list[int], max_tokens: int = 2, n: int = 1) -> None:
        scheduler.submit(
            Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(n=n), max_tokens=max_tokens, seed=1)
        )

    submit("a", [1, 2])
    for name, work in {
        "the same id": lambda: submit("a", [1]),
        "no prompt": lambda: submit("b", []),
        "no output": lambda: submit("b", [1], 0),
        "longer than the context": lambda: submit("b", [1] * 70),
        "larger than the pool": lambda: submit("b", [1] * 40),
        "more than there is room for": lambda: submit("b", [1], n=4),
        "a result that nobody waits for": lambda: scheduler.commit(StepResult(step=99)),
    }.items():
        expect(f"scheduler: {name}", raises(QuireError, work))
    expect("scheduler: refusals leave one request", list(scheduler.live.requests) == ["a"])
    plan = scheduler.schedule()
    expect("scheduler: it still plans", plan is not None and plan.n_tokens == 2)


def main() -> int:
    expect("python runs with -O", not __debug__)
    asyncio.run(check_server())
    check_options()
    check_scheduler()
    failed = [name for name, passed in CHECKS if not passed]
    print("\n".join([*failed, f"{len(CHECKS) - len(failed)} of {len(CHECKS)} checks passed"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
