"""Clients that are programs: run as a user runs them, against the live server, and judged by what they leave."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml
from conftest import GROUPS, HERE, NPM, ROOT, Shell, installed

SUM, SUM_ANSWER = "What is 23 + 45?", "23 + 45 = 68."
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
MESSAGES: Any = [{"role": "user", "content": SUM}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOKENIZER = ROOT / "quire" / "_models" / "demo"
PROXY_KEY = "sk-conformance-0123456789abcdef0123456789"


# ---- llm


@pytest.fixture
def llm(server: Any, shell: Shell) -> Any:
    program = installed(GROUPS / "tasks") / "bin" / "llm"
    model = {"model_id": "quire", "model_name": "demo", "api_base": server.base + "/v1"}
    models = [{**model, "supports_tools": True, "supports_schema": True}]
    (shell.home / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))

    def run(*arguments: str) -> str:
        greedy = [program, "-m", "quire", "-o", "temperature", "0", *arguments]
        return shell.run(greedy, LLM_USER_PATH=shell.home, OPENAI_API_KEY="none").strip()

    return run


def test_llm(llm: Any) -> None:
    assert llm(SUM) == llm("--no-stream", SUM) == SUM_ANSWER
    function = (
        'def get_weather(city: str) -> str:\n    "Get the weather of a city"\n    return f"clear in {city}, 21 degrees"'
    )
    assert "Paris" in llm("--functions", function, WEATHER[0]["content"])
    person = llm("--schema", "name str, age int", "Extract name and age as JSON: Bob is 31 years old.")
    assert json.loads(person) == {"name": "Bob", "age": 31}


# ---- lm-eval


def test_lm_eval(server: Any, shell: Shell) -> None:
    program = installed(GROUPS / "tasks") / "bin" / "lm-eval"
    rows = [{"question": SUM, "answer": SUM_ANSWER}, {"question": "What is 2 + 3?", "answer": "2 + 3 = 5."}]
    (shell.home / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(shell.home / "sums.jsonl")}}}
    task = {"task": "sums", **data, "test_split": "test", "doc_to_text": "{{question}}"}
    said = {
        **task,
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chosen = {
        **task,
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, 'Bananas are blue.']}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for one in (said, chosen):
        (shell.home / f"{one['task']}.yaml").write_text(yaml.safe_dump(one))

    def result(model: str, path: str, name: str, *more: str) -> Any:
        arguments = f"model=demo,base_url={server.base}{path}"
        out = shell.home / name
        command = [program, "run", "--model", model, "--tasks", name, "--include_path", shell.home]
        shell.run([*command, "--output_path", out, *more[1:], "--model_args", f"{arguments},{more[0]}"], limit_s=280)
        (found,) = out.rglob("results_*.json")
        return json.loads(found.read_text())["results"][name]

    chat = result(
        "local-chat-completions", "/v1/chat/completions", "sums", "tokenizer_backend=None", "--apply_chat_template"
    )
    assert chat["exact_match,none"] == 1
    scored = result(
        "local-completions", "/v1/completions", "choice", f"tokenizer={TOKENIZER},tokenizer_backend=huggingface"
    )
    assert scored["acc,none"] == 1, "the right answer is not the likelier one"


# ---- aider


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_aider(server: Any, shell: Shell, stream: bool) -> None:
    program = installed(GROUPS / "aider") / "bin" / "aider"
    prices = shell.home / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text('{"openai/demo": {"max_input_tokens": 1024, "litellm_provider": "openai", "mode": "chat"}}')
    flags = [
        "--no-show-model-warnings",
        "--no-analytics",
        "--no-check-update",
        "--no-git",
        "--yes-always",
        "--no-pretty",
    ]
    command = [program, "--model", "openai/demo", "--chat-mode", "ask", *flags, "--map-tokens", "0", "--message", SUM]
    command += ["--stream" if stream else "--no-stream"]
    said = shell.run(command, OPENAI_API_BASE=server.base + "/v1", OPENAI_API_KEY="none")
    assert SUM_ANSWER in said and "received" in said


# ---- load generators


def test_aiperf(server: Any, shell: Shell) -> None:
    program = installed(GROUPS / "aiperf") / "bin" / "aiperf"
    where = ["-m", "demo", "--url", server.base, "--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER]
    load = ["--request-count", "6", "--concurrency", "2", "--synthetic-input-tokens-mean", "32"]
    load += ["--output-tokens-mean", "16", "--artifact-dir", shell.home / "out", "--ui", "none"]
    shell.run([program, "profile", *where, *load], 280, HF_HUB_OFFLINE="")  # offline it takes no folder
    found = json.loads((shell.home / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 6 and not found["error_summary"]
    assert found["time_to_first_token"]["avg"] > 0 and found["output_sequence_length"]["avg"] > 0


def test_guidellm(server: Any, shell: Shell) -> None:
    program = installed(GROUPS / "guidellm") / "bin" / "guidellm"
    command = [program, "run", "--backend", f"kind=openai_http,target={server.base},model=demo"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    shell.run([*command, "--output", f"kind=json,path={shell.home / 'g.json'}"], limit_s=280)
    (one,) = json.loads((shell.home / "g.json").read_text())["benchmarks"]
    totals = one["metrics"]["request_totals"]
    assert totals["successful"] == 4 and totals["errored"] == 0


def test_vllm_bench_serve(server: Any, shell: Shell) -> None:
    python = installed(GROUPS / "vllm") / "bin" / "python"
    where = ["--backend", "openai-chat", "--base-url", server.base, "--endpoint", "/v1/chat/completions"]
    load = ["--model", "demo", "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "32"]
    load += ["--random-output-len", "16", "--num-prompts", "6", "--max-concurrency", "2"]
    out = ["--save-result", "--result-dir", shell.home, "--result-filename", "out.json"]
    shell.run([python, HERE / "scripts" / "with_vllm_bench.py", *where, *load, *out], 280, VLLM_NO_USAGE_STATS=1)
    found = json.loads((shell.home / "out.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0) and found["total_output_tokens"] == 6 * 16


# ---- litellm's proxy


@pytest.fixture(scope="module")
def proxy(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = installed(GROUPS / "proxy") / "bin" / "litellm"
    shell = Shell(tmp_path_factory.mktemp("proxy"))
    kinds = {"vllm": "hosted_vllm/demo", "openai": "openai/demo", "anthropic": "anthropic/demo"}
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": model,
                "api_base": server.base + ("" if name == "anthropic" else "/v1"),
                "api_key": "none",
            },
        }
        for name, model in kinds.items()
    ]
    config = {"model_list": models, "general_settings": {"master_key": PROXY_KEY}}
    (shell.home / "config.yaml").write_text(yaml.safe_dump({**config, "litellm_settings": {"telemetry": False}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1", "--telemetry", "False"]
    log = shell.home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=shell.home, env=shell.environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline_s = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("model", ["vllm", "openai", "anthropic"])
def test_litellm_proxy(proxy: str, model: str) -> None:
    client = openai.OpenAI(base_url=proxy + "/v1", api_key=PROXY_KEY, max_retries=0)
    fields: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    assert client.chat.completions.create(**fields).choices[0].message.content == SUM_ANSWER
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == SUM_ANSWER
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    called: Any = client.chat.completions.create(**{**fields, "messages": WEATHER}, tools=tools, tool_choice="required")
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"]


@pytest.mark.parametrize("model", ["vllm", "openai", "anthropic"])
def test_litellm_proxy_messages(proxy: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=proxy, api_key=PROXY_KEY, max_retries=0)
    fields: Any = {"model": model, "max_tokens": 60, "extra_body": {"temperature": 0}}
    answer: Any = client.messages.create(**fields, messages=MESSAGES)
    assert answer.content[0].text == SUM_ANSWER and answer.usage.output_tokens > 1
    with client.messages.stream(**fields, messages=MESSAGES) as stream:
        assert stream.get_final_text() == SUM_ANSWER
    tools: Any = [{"name": "get_weather", "input_schema": SCHEMA}]
    with client.messages.stream(**fields, messages=WEATHER, tools=tools, tool_choice={"type": "any"}) as stream:
        call: Any = stream.get_final_message().content[-1]
    assert call.name == "get_weather" and call.input["city"]


@pytest.mark.parametrize("model", ["vllm", "openai", "anthropic"])
def test_litellm_proxy_responses(proxy: str, model: str) -> None:
    client = openai.OpenAI(base_url=proxy + "/v1", api_key=PROXY_KEY, max_retries=0)
    fields: Any = {"model": model, "temperature": 0, "max_output_tokens": 60}
    assert client.responses.create(**fields, input=SUM).output_text == SUM_ANSWER
    events = client.responses.create(**fields, input=SUM, stream=True)
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == SUM_ANSWER
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    called = client.responses.create(**fields, input=WEATHER[0]["content"], tools=tools, tool_choice="required")
    (call,) = [one for one in called.output if one.type == "function_call"]
    assert json.loads(call.arguments)["city"]


# ---- programs of npm


def npm(name: str) -> Path:
    return installed(NPM / name)


@pytest.mark.parametrize("name", ["openai", "anthropic", "ai", "ollama"])
def test_npm_client(server: Any, shell: Shell, name: str) -> None:
    folder = npm("clients")
    for one in (HERE / "npm" / "clients").glob("*.mjs"):  # modules are looked for from where the script lies
        shutil.copyfile(one, folder / one.name)
    said = shell.run(["node", folder / f"{name}.mjs", server.base])
    results = json.loads(said.strip().splitlines()[-1])
    assert results and {one: found for one, found in results.items() if found is not True} == {}


CODEX = """
model = "demo"
model_provider = "quire"
approval_policy = "never"
sandbox_mode = "read-only"
check_for_update_on_startup = false
model_instructions_file = "{home}/instructions.md"
web_search = "{search}"
include_permissions_instructions = false
include_environment_context = false
[skills]
include_instructions = false
[features]
goals = false
[agents]
enabled = {agents}
[analytics]
enabled = false
[otel]
exporter = "none"
metrics_exporter = "none"
[model_providers.quire]
name = "Quire"
base_url = "{base}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
"""Without the 12,000 tokens of its own instructions, which the demo model was not made for."""


@pytest.mark.parametrize("question", ["What is 2 + 3?", "Run ls."])
def test_codex(roomy_server: Any, shell: Shell, question: str) -> None:
    program = npm("clients") / "node_modules" / ".bin" / "codex"
    (shell.home / "instructions.md").write_text("You are a helpful assistant.")
    config = CODEX.format(home=shell.home, base=roomy_server.base, search="disabled", agents="false")
    (shell.home / "config.toml").write_text(config)
    said = shell.run([program, "exec", "--json", "--skip-git-repo-check", question], CODEX_HOME=shell.home)
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 1
    items = [one["item"] for one in events if one["type"] == "item.completed"]
    assert [one for one in items if one["type"] == "agent_message" and one["text"]]


def test_promptfoo(server: Any, shell: Shell) -> None:
    program = npm("promptfoo") / "node_modules" / ".bin" / "promptfoo"
    where = {"apiBaseUrl": server.base + "/v1", "apiKey": "none", "temperature": 0}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    providers = [
        {"id": "openai:chat:demo", "config": {**where, "max_tokens": 60}},
        {"id": "openai:responses:demo", "config": {**where, "max_output_tokens": 60}},
        {"id": "anthropic:messages:demo", "config": {**where, "apiBaseUrl": server.base, "max_tokens": 60}},
    ]
    talk = {"prompts": ["{{question}}"], "providers": providers, "tests": [{"vars": {"question": SUM}}]}
    forced = {**where, "max_tokens": 60, "tools": [tool], "tool_choice": "required"}
    ask = {"vars": {"question": WEATHER[0]["content"]}}
    call = {**talk, "providers": [{"id": "openai:chat:demo", "config": forced}], "tests": [ask]}

    def outputs(name: str, config: dict[str, Any]) -> list[Any]:
        (shell.home / f"{name}.yaml").write_text(yaml.safe_dump(config))
        flags = ["--no-cache", "--no-table", "--no-progress-bar", "-o", f"{name}.json"]
        shell.run([program, "eval", "-c", f"{name}.yaml", *flags], PROMPTFOO_CONFIG_DIR=shell.home)
        found = json.loads((shell.home / f"{name}.json").read_text())["results"]["results"]
        return [one["response"].get("output") for one in found]

    assert outputs("talk", talk) == [SUM_ANSWER] * 3
    (called,) = outputs("call", call)
    assert json.loads(called[0]["function"]["arguments"])["city"]
