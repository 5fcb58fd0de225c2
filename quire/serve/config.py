"""`ServerConfig`: every option of the HTTP server, once. Flags (`quire serve --help`) and docs are generated from it.

Owns names, types, defaults, bounds and meaning. Does not own options of the engine (`config/engine.py`).
Invariant: after `verify()` the address can be bound, the key is safe to compare, and the key is in no repr.
"""

from __future__ import annotations

import pathlib
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core import env
from quire.core.errors import ConfigError, shown
from quire.serve.http.hosts import Cors, binds_loopback, check_allowed
from quire.serve.ops.traces import check_endpoint
from quire.text import harmony
from quire.text.chat_template import RESERVED

_KEY = re.compile(r"[\x21-\x7e]+")
_UNSET = "\0"
_VARIABLE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){0,16}")

ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "openai", "deepseek_v3", "deepseek_v31", "glm45",
    "qwen3_coder", "minimax_m2",
]  # fmt: skip


def _doc(text: str, extra: dict[str, Any] | None = None, **bounds: float) -> Meta:
    # As in config/engine.py: the stubs of msgspec have no overload for this.
    return Meta(description=text, extra=extra, **bounds)  # type: ignore[call-overload, no-any-return]


class ServerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of one HTTP server. Spelling follows vLLM where vLLM has the option."""

    host: Annotated[str, _doc("Address to listen on; 0.0.0.0 listens on every interface (set an API key then).")] = (
        "127.0.0.1"
    )
    headless: Annotated[bool, _doc("Serve no HTTP: hold the ranks of a node_rank above 0 for node 0.")] = False
    port: Annotated[int, _doc("TCP port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_key: Annotated[
        str | None,
        _doc("Key that clients must send as 'Authorization: Bearer KEY'; QUIRE_API_KEY sets it out of sight of `ps`."),
    ] = None
    api_key_file: Annotated[
        str,
        _doc(
            'JSON file with more keys, {"keys": [{"key": "...", "name": "...", "requests_per_minute": 60,'
            ' "tokens_per_minute": 100000}]}; names are tenants, which share the engine fairly and no cached prefixes.'
            " Read again when it changes."
        ),
    ] = ""
    allowed_hosts: Annotated[
        list[str],
        _doc(
            "Names under which clients may reach the server, as their Host header has them: api.example.com,"
            " *.example.com, or * for any; others get 421. Loopback names are always taken. When none is given a server"
            " on loopback answers under these alone, any other server under every name."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str],
        _doc(
            "Origins of other web pages that may use the server from a browser (CORS), such as"
            " https://app.example.com, or * for any. The server's own web page needs none.",
            {"json_list": True},
        ),
    ] = []
    allowed_methods: Annotated[
        list[str],
        _doc("HTTP methods that web pages of --allowed-origins may use; * for all.", {"json_list": True}),
    ] = msgspec.field(default_factory=lambda: ["*"])
    allowed_headers: Annotated[
        list[str],
        _doc("Request headers that web pages of --allowed-origins may send; * for any.", {"json_list": True}),
    ] = msgspec.field(default_factory=lambda: ["*"])
    allow_credentials: Annotated[
        bool,
        _doc(
            "Let browsers send cookies and basic authentication for web pages of --allowed-origins, which must then be"
            " named: a proxy may ask for them. API keys need none."
        ),
    ] = False
    disable_page: Annotated[bool, _doc("Do not serve the web page at /.")] = False
    starter_prompts: Annotated[
        list[str], _doc("Questions that the web page proposes for an empty conversation, instead of its own.")
    ] = []
    access_log: Annotated[bool, _doc("Log one line a request (route, status, seconds; never its content).")] = False
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"], _doc("Level of the HTTP layer's own log.")
    ] = "warning"
    max_body_bytes: Annotated[int, _doc("Longest request body; a longer one is refused with 413.", ge=1024)] = (
        16 * 1024 * 1024
    )
    max_pending_body_bytes: Annotated[
        int,
        _doc(
            "Bytes of request bodies over 64 KiB that an API process may hold until they are decoded; more are refused"
            " with 429.",
            ge=1024,
        ),
    ] = 256 * 1024 * 1024
    max_logprob_cells: Annotated[
        int,
        _doc(
            "Most values that the log-probabilities of one answer may have: sequences times max_tokens times"
            " logprobs + 1; more is refused with 400. One takes 8 bytes until the answer is written.",
            ge=1,
        ),
    ] = 1 << 22
    max_header_bytes: Annotated[int, _doc("Longest request line plus headers; more is refused with 431.", ge=1024)] = (
        32 * 1024
    )
    max_headers: Annotated[int, _doc("Most header fields; more are refused with 431.", ge=8)] = 100
    header_timeout: Annotated[
        float, _doc("Seconds in which the request line and headers must arrive (408).", gt=0, le=86400)
    ] = 10.0
    body_timeout: Annotated[float, _doc("Seconds in which the body must arrive (408).", gt=0, le=86400)] = 60.0
    write_timeout: Annotated[
        float, _doc("Seconds after which a client that does not read its stream is cut off.", gt=0, le=86400)
    ] = 30.0
    keep_alive_timeout: Annotated[float, _doc("Seconds for which an idle connection stays open.", gt=0, le=86400)] = (
        75.0
    )
    sse_keep_alive: Annotated[
        float, _doc("Seconds of silence after which a stream sends a comment.", gt=0, le=86400)
    ] = 15.0
    max_queue_seconds: Annotated[
        float, _doc("Longest time that a request waits for its turn (503 after it); 0: any.", ge=0, le=86400)
    ] = 0.0
    request_timeout: Annotated[
        float, _doc("Longest time that a request takes in the engine (408 after it); 0: any.", ge=0, le=86400)
    ] = 0.0
    api_processes: Annotated[
        int, _doc("Processes that serve HTTP on the port; more than 1 when one core is not enough.", ge=1, le=64)
    ] = 1
    api_stall_timeout: Annotated[
        float,
        _doc(
            "With several API processes: seconds without a sign of life after which one that hangs, or that somebody"
            " has stopped with a signal, is ended and replaced, because connections wait in its queue; 0: never.",
            ge=0,
            le=86400,
        ),
    ] = 30.0
    record: Annotated[
        str, _doc("File to which a line of JSON is added for each request that ends, for `quire bench replay`.")
    ] = ""
    record_prompts: Annotated[bool, _doc("Put token ids of prompts into the record, not only their lengths.")] = False
    calibration: Annotated[
        str,
        _doc(
            "File of `quire bench calibrate` of this machine, by which /v1/requests/{id}/explain says what a request"
            " should have taken; without one it says so for devices whose calibration comes with Quire."
        ),
    ] = ""
    otlp_traces_endpoint: Annotated[
        str,
        _doc(
            "URL of a collector (OTLP over HTTP, such as http://localhost:4318/v1/traces) to which an OpenTelemetry"
            " span of each request is sent; needs `pip install opentelemetry-sdk"
            " opentelemetry-exporter-otlp-proto-http`."
        ),
    ] = ""
    shutdown_timeout: Annotated[
        float, _doc("Seconds that running requests get to finish after SIGINT or SIGTERM.", ge=0, le=86400)
    ] = 30.0
    max_prompts: Annotated[
        int, _doc("Most prompts in one /v1/completions request, and most sequences (prompts times n).", ge=1)
    ] = 1024
    data_dir: Annotated[
        str, _doc("Folder in which files and batches are kept; without it /v1/files and /v1/batches are off.")
    ] = ""
    max_file_bytes: Annotated[
        int, _doc("Longest file that /v1/files takes; a longer one is refused with 413.", ge=1024)
    ] = 200 * 1024 * 1024
    max_data_bytes: Annotated[
        int,
        _doc(
            "Bytes that all files and results of batches in --data-dir may have together; an upload beyond is refused"
            " with 507, a batch whose outputs go beyond fails.",
            ge=1024,
        ),
    ] = 10 * 1024**3
    max_data_bytes_per_key: Annotated[
        int, _doc("Bytes of these that the files and results of one key's name may have; 0: all of them.", ge=0)
    ] = 0
    batch_concurrency: Annotated[
        int, _doc("Most lines of a batch that run at once; fewer while other requests need the slots.", ge=1)
    ] = 64
    strict: Annotated[
        bool,
        _doc(
            "Refuse with 400 what is otherwise let through because it does no harm: request fields that are unknown or"
            " do nothing here, and max_tokens beyond the context. A request can ask for the same with X-Strict: 1."
        ),
    ] = False
    enable_chat_template_kwargs: Annotated[
        bool,
        _doc(
            "Let requests pass chat_template_kwargs to the chat template: plain values of the variables that it has;"
            " others are ignored."
        ),
    ] = True
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        _doc(
            "Variables of the chat template, as a JSON object, where a request does not set them itself."
            ' {"enable_thinking": false}'
        ),
    ] = {}
    root_path: Annotated[
        str,
        _doc(
            "Path under which a proxy shows the server, such as /llm: requests for /llm/v1/models and for /v1/models"
            " are both answered, whether the proxy takes the prefix off or not."
        ),
    ] = ""
    tool_call_parser: Annotated[
        ToolCallParser,
        _doc(
            "How the model writes tool calls. auto: as its chat template teaches it, if that is one of these; none:"
            " calls stay text."
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, _doc("Let the model choose whether to call tools; switched off, tool_choice auto is refused.")
    ] = True
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3", "openai_gptoss"],
        _doc(
            "How the model marks its reasoning, which is then reasoning_content. auto: <think>...</think> if the chat"
            " template has these marks, gpt-oss's channel analysis if it has those; openai_gptoss: the latter;"
            " deepseek_r1: the former, for templates that do not open the reasoning themselves."
        ),
    ] = "auto"
    ssl_certfile: Annotated[str, _doc("PEM file with the certificate; with --ssl-keyfile it turns HTTPS on.")] = ""
    ssl_keyfile: Annotated[str, _doc("PEM file with the private key.")] = ""

    def verify(self) -> None:
        """Check every field and read QUIRE_API_KEY; raises ConfigError naming the field, the value and the limit."""
        try:
            msgspec.convert(msgspec.to_builtins(self), ServerConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"server options: {error}") from None
        if self.api_key is None:
            value = env.read("QUIRE_API_KEY", _UNSET)
            self.api_key = None if value == _UNSET else value
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise ConfigError(
                "the API key (--api-key or QUIRE_API_KEY) is empty or has a blank or non-ASCII character: "
                "give visible ASCII characters, or leave the option and the variable out to serve without a key"
            )
        check_default_kwargs(self.default_chat_template_kwargs)
        _check_parsers(self.tool_call_parser, self.reasoning_parser)
        if not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path = {shown(self.root_path)} must begin with / and not end with it, and have letters, digits"
                " and . _ ~ - between, such as /llm; or be left out"
            )
        check_allowed(self.allowed_hosts, self.cors)
        if self.otlp_traces_endpoint:
            check_endpoint(self.otlp_traces_endpoint)
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together: give both or neither")
        for name in ("ssl_certfile", "ssl_keyfile", "calibration"):
            path = getattr(self, name)
            if path and not pathlib.Path(path).is_file():
                raise ConfigError(f"{name} = {path!r} is not a file")

    @property
    def cors(self) -> Cors:
        """What web pages of other origins may do."""
        return Cors(self.allowed_origins, self.allowed_methods, self.allowed_headers, self.allow_credentials)

    @property
    def is_public(self) -> bool:
        """True if other machines can reach the address."""
        return not binds_loopback(self.host)

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.api_key is not None:
            fields["api_key"] = "***"
        return f"ServerConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _check_parsers(tools: str, reasoning: str) -> None:
    """gpt-oss writes calls and reasoning in one format, which goes with no other."""
    either = ("auto", "none")
    if (tools == harmony.TOOLS and reasoning not in (*either, harmony.REASONING)) or (
        reasoning == harmony.REASONING and tools not in (*either, harmony.TOOLS)
    ):
        raise ConfigError(
            f"tool_call_parser = {tools} and reasoning_parser = {reasoning} are of different models: {harmony.TOOLS} "
            f"and {harmony.REASONING} go together; leave one of them out"
        )


def check_default_kwargs(kwargs: dict[str, Any]) -> None:
    """ConfigError for a variable that every request would be refused for."""
    for name in kwargs:
        if name in RESERVED.split() or not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"default_chat_template_kwargs: {shown(name)} cannot be set: give variables of the chat template's own,"
                " such as enable_thinking"
            )
