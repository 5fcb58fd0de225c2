"""Constrained output and tool calls with OpenAI's client against `quire serve` on the bundled model."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest
from test_serve_live import MODEL, Process

pytestmark = pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="needs the bundled model")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "description": "Set a timer",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer", "minimum": 1, "maximum": 60}},
                "required": ["minutes"],
                "additionalProperties": False,
            },
        },
    },
]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def live() -> Iterator[Process]:
    process = Process("--served-model-name", "demo")
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def client(live: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.base + "/v1", api_key="none", max_retries=0)


def arguments_of(choice: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls or []]


def test_parsed_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Extract name and age as JSON: Bob is 31 years old."}]
    answer = client.chat.completions.parse(model="demo", messages=messages, response_format=Person, temperature=0)
    assert answer.choices[0].message.parsed == Person(name="Bob", age=31)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=WEATHER, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=60
    )
    assert arguments_of(answer.choices[0]) == [("get_weather", {"city": "Paris"})]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_whole_conversation_with_a_tool(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="demo", messages=WEATHER, tools=TOOLS, temperature=0)
    call = first.choices[0].message.tool_calls[0]
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"city": "Paris", "temperature": 21, "sky": "clear"}',
    }
    messages = [*WEATHER, first.choices[0].message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS, temperature=0, max_tokens=60)
    assert second.choices[0].message.content and second.choices[0].finish_reason == "stop"


def test_a_forced_call_fits_its_schema(client: openai.OpenAI) -> None:
    """A question that has nothing to do with the function, at a high temperature."""
    named: Any = {"type": "function", "function": {"name": "set_timer"}}
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello!"}], tools=TOOLS, tool_choice=named,
        temperature=1.5, n=6, seed=1, max_tokens=100,
    )  # fmt: skip
    for choice in answer.choices:
        ((name, arguments),) = arguments_of(choice)
        assert name == "set_timer"
        jsonschema.validate(arguments, TOOLS[1]["function"]["parameters"])


def test_strict_tools_may_still_be_left_alone(client: openai.OpenAI) -> None:
    strict = [{"type": "function", "function": {**one["function"], "strict": True}} for one in TOOLS]
    said = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hello!"}], tools=strict, temperature=0, max_tokens=40
    )
    assert said.choices[0].message.content and not said.choices[0].message.tool_calls
    called = client.chat.completions.create(model="demo", messages=WEATHER, tools=strict, temperature=0, max_tokens=60)
    assert arguments_of(called.choices[0]) == [("get_weather", {"city": "Paris"})]


def test_streams_join_to_the_answer(client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": WEATHER, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert arguments_of(final) == arguments_of(whole) and final.finish_reason == whole.finish_reason == "tool_calls"


def test_many_kinds_at_once(client: openai.OpenAI, live: Process) -> None:
    """Free and constrained requests and hostile ones together; nothing is left behind."""

    def ask(number: int) -> str:
        extra = [
            None,
            {"guided_regex": "[a-z]{4}"},
            {"structured_outputs": {"choice": ["red", "blue"]}},
            {"guided_json": {"type": "array", "minItems": 10**9}},
            {"guided_regex": "("},
            {"structured_outputs": {"json": {"enum": [f"v{i}" for i in range(15_000)] + [number]}}},
        ][number % 6]
        try:
            answer = client.completions.create(
                model="demo", prompt=f"{number}:", max_tokens=12, seed=number, extra_body=extra
            )
        except openai.BadRequestError:
            return "400"
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(36)))
    assert all(len(text) == 4 and text.isalpha() for text in texts[1::6])
    assert all(text in ("red", "blue") for text in texts[2::6]) and all(text == "400" for text in texts[4::6])
    metrics = httpx.get(live.base + "/metrics", timeout=60).text
    assert httpx.get(live.base + "/health", timeout=60).status_code == 200 and "quire" in metrics
