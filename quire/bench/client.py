"""One streamed completion over HTTP, with the time of each chunk; and the little a client asks before a run.

Owns the wire format of requests and chunks. Times are `time.perf_counter` seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
import urllib.parse

import aiohttp
import msgspec

from quire.bench.datasets import BenchRequest
from quire.bench.sse import DONE, EventParser
from quire.core.errors import ConfigError, EngineError, shown

ERROR_CHARS = 300
TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600)
POLL_S = 0.5


@dataclasses.dataclass(slots=True)
class ClientTrace:
    """What the client saw of one request. A failed one has `error` and does not count in latencies."""

    n_input: int = 0
    start_s: float = 0.0
    """When the request was handed to the connection."""
    scheduled_s: float = 0.0
    """When it should have been, by its arrival time."""
    chunk_times_s: list[float] = dataclasses.field(default_factory=list)
    n_output: int = 0
    """Tokens by the server's `usage`; the number of chunks when it sends none."""
    has_usage: bool = False
    error: str = ""
    request_id: str = ""
    """That the server gave it, in its `x-request-id`; empty: it gives none."""

    @property
    def ttft_s(self) -> float:
        """Submission to first chunk."""
        return self.chunk_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """Submission to last chunk."""
        return self.chunk_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1); None for fewer than two tokens."""
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.n_output - 1) if self.n_output > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


_NULL = msgspec.Raw(b"null")


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    """The fields of a streamed completion chunk that matter here; others are skipped undecoded."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclasses.dataclass(slots=True)
class CompletionsClient:
    """Sends token-id prompts to one `/v1/completions`. `fields` go into every request."""

    session: aiohttp.ClientSession
    url: str
    model: str
    fields: dict[str, object]

    async def complete(
        self, request: BenchRequest, scheduled_s: float | None = None, trace: ClientTrace | None = None
    ) -> ClientTrace:
        """Run one request to its end; failures are put into the trace, not raised.

        trace: an unused one to write to, for a caller who reads it while the request runs.
        """
        body = msgspec.json.encode(self._payload(request))
        trace = trace or ClientTrace()
        trace.n_input, trace.start_s = len(request.prompt_token_ids), time.perf_counter()
        trace.scheduled_s = trace.start_s if scheduled_s is None else scheduled_s
        try:
            headers = {"Content-Type": "application/json"}
            async with self.session.post(self.url, data=body, headers=headers) as response:
                trace.request_id = response.headers.get("x-request-id", "")
                if response.status != 200:
                    trace.error = f"HTTP {response.status}: {(await response.text())[:ERROR_CHARS]}"
                else:
                    await _read_stream(response, trace)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            trace.error = f"{type(error).__name__}: {error}"[:ERROR_CHARS]
        return trace

    def _payload(self, request: BenchRequest) -> dict[str, object]:
        return {
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


async def _read_stream(response: aiohttp.ClientResponse, trace: ClientTrace) -> None:
    """Note the time of each chunk with a choice; a stream without [DONE] was cut off and is an error."""
    parser = EventParser()
    ended = False
    async for piece in response.content.iter_any():
        now_s = time.perf_counter()
        for payload in parser.feed(piece):
            if payload == DONE:
                ended = True
                continue
            chunk = _CHUNKS.decode(payload)
            if chunk.error != _NULL:
                trace.error = bytes(chunk.error).decode(errors="replace")[:ERROR_CHARS]
                return
            if chunk.choices:
                trace.chunk_times_s.append(now_s)
            if chunk.usage is not None:
                trace.n_output, trace.has_usage = chunk.usage.completion_tokens, True
    if not trace.has_usage:
        trace.n_output = len(trace.chunk_times_s)
    if not ended or not trace.chunk_times_s:
        trace.error = "the stream ended " + ("without a token" if ended else "before [DONE]")


def open_session(api_key: str) -> aiohttp.ClientSession:
    """A session without a cap on connections, which would measure the client and not the server."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=60)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(connector=connector, timeout=TIMEOUT, headers=headers, read_bufsize=2**18)


def check_base_url(base_url: str) -> str:
    """The same without a last slash. ConfigError for what is no address, for which nobody should wait."""
    try:
        parts = urllib.parse.urlsplit(base_url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or of brackets
        is_address = False
    if not is_address:
        raise ConfigError(f"--base-url {shown(base_url)} is not the address of a server: write http://HOST:PORT")
    return base_url.rstrip("/")


async def first_model(session: aiohttp.ClientSession, base_url: str, limit_s: float) -> str:
    """Wait until the server lists its models and return the first; that it waits is said once, on stderr.

    EngineError when `limit_s` has passed.
    """
    deadline_s = time.monotonic() + limit_s
    is_said = False
    while True:
        try:
            async with session.get(base_url + "/v1/models") as response:
                body = await response.read()
                if response.status == 200:
                    return msgspec.json.decode(body, type=_Models).data[0].id
                problem = f"HTTP {response.status}: {body[:ERROR_CHARS].decode(errors='replace')}"
                if response.status in (401, 403, 404):
                    raise EngineError(f"{base_url}/v1/models answers {problem}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = _connection_problem(error)
        except (msgspec.DecodeError, IndexError) as error:
            raise EngineError(f"{base_url}/v1/models is not a list of models: {error}") from None
        if time.monotonic() >= deadline_s:
            raise EngineError(f"no answer from {base_url} within {limit_s:g} s ({problem}): is the server running?")
        if not is_said:
            print(f"waiting up to {limit_s:g} s for the server at {base_url} ({problem})", file=sys.stderr, flush=True)
            is_said = True
        await asyncio.sleep(POLL_S)


def _connection_problem(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        host = f"[{error.host}]" if ":" in error.host else error.host
        return f"nothing listens at {host}:{error.port} yet"
    return f"{type(error).__name__}: {error}"
