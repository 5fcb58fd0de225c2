"""Ollama's own client on the live server: chat, streams, tools, shapes, raw prompts, vectors, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pydantic
import pytest

QUESTION: Any = [{"role": "user", "content": "What is 23 + 45?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
GREEDY: Any = {"temperature": 0, "num_predict": 60}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
      city: its name
    """
    return json.dumps({"city": city, "temperature": 21, "sky": "clear"})


@pytest.fixture(scope="module")
def client(server: Any) -> ollama.Client:
    return ollama.Client(host=server.base)


def test_chat_and_stream(client: ollama.Client) -> None:
    answer = client.chat(model="demo:latest", messages=QUESTION, options=GREEDY)
    assert answer.message.content and answer.done_reason == "stop" and answer.done
    assert answer.eval_count and answer.prompt_eval_count and answer.eval_duration and answer.total_duration
    parts = list(client.chat(model="demo", messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert parts[-1].done and parts[-1].eval_count == answer.eval_count


def test_tools(client: ollama.Client) -> None:
    """The model is free to call; what it calls is a whole call, streamed or not, and its result can be sent back."""
    fields: Any = {"model": "demo", "messages": WEATHER, "tools": [get_weather], "options": GREEDY}
    message = client.chat(**fields).message
    streamed = [call for part in client.chat(**fields, stream=True) for call in part.message.tool_calls or []]
    assert message.tool_calls and list(message.tool_calls) == streamed
    call = message.tool_calls[0].function
    assert call.name == "get_weather" and isinstance(call.arguments["city"], str)
    result = {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}
    again = client.chat(**{**fields, "messages": [*WEATHER, message, result]})
    assert again.message.content or again.message.tool_calls


def test_a_shape(client: ollama.Client) -> None:
    messages: Any = [{"role": "user", "content": "Extract name and age as JSON: Bob is 31 years old."}]
    answer = client.chat(model="demo", messages=messages, format=Person.model_json_schema(), options={"temperature": 0})
    assert Person.model_validate_json(answer.message.content or "") == Person(name="Bob", age=31)


def test_prompts(client: ollama.Client) -> None:
    fields: Any = {"model": "demo", "prompt": "def read_file(path):", "raw": True, "options": GREEDY}
    whole = client.generate(**fields)
    assert whole.response and whole.done_reason in ("stop", "length")
    assert "".join(part.response for part in client.generate(**fields, stream=True)) == whole.response
    assert client.generate(model="demo", prompt="Hello", system="Be brief.", options=GREEDY).response


def test_vectors_and_models(client: ollama.Client) -> None:
    found = client.embed(model="demo", input=["a", "b"])
    assert len(found.embeddings) == 2 and abs(sum(x * x for x in found.embeddings[0]) - 1) < 1e-3
    assert len(client.embeddings(model="demo", prompt="a").embedding) == len(found.embeddings[0])
    assert [one.model for one in client.list().models] == ["demo:latest"] == [one.model for one in client.ps().models]
    shown = client.show("demo")
    assert shown.modelinfo and shown.modelinfo["general.architecture"] and "tools" in (shown.capabilities or [])


def test_refusals(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="nothing", messages=QUESTION)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as wrong:
        client.chat(model="demo", messages=QUESTION, options={"temperature": -1})
    assert wrong.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="images"):
        client.chat(model="demo", messages=[{"role": "user", "content": "What is it?", "images": [b"GIF89a"]}])
