"""Six clients, each in its own words: a chat, the same as a stream, and a tool call, on the live server.

The demo model is small: calls are asked for with tool_choice, so that the server enforces them, and answers of a shape
with response_format. Where a client gives the whole and the stream, at temperature 0 the two are the same text.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import instructor
import litellm
import openai
import pydantic
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the weather in Paris?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
GREETING: Any = [{"role": "user", "content": "What is 23 + 45?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": PARAMETERS},
    }
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
LIMIT = 60


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


@pytest.fixture(scope="module")
def url(server: Any) -> str:
    return str(server.base) + "/v1"


def is_call(name: str, arguments: Any) -> bool:
    """True for a call that has the shape that was asked for."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == "get_weather" and isinstance(values["city"], str) and bool(values["city"])


# ---- openai


@pytest.fixture(scope="module")
def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_openai_chat_and_stream(openai_client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": GREETING, "temperature": 0, "max_tokens": LIMIT}
    answer = openai_client.chat.completions.create(**fields)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    chunks = list(openai_client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        == answer.choices[0].message.content
    )
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_openai_tools(openai_client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "max_tokens": LIMIT}
    answer = openai_client.chat.completions.create(**fields, tool_choice=NAMED).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls is not None
    call: Any = answer.message.tool_calls[0]
    assert is_call(call.function.name, call.function.arguments)
    with openai_client.chat.completions.stream(**fields, tool_choice="required") as stream:
        final: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert is_call(final[0].function.name, final[0].function.arguments)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'}
    fields["messages"] = [*MESSAGES, answer.message.model_dump(exclude_none=True), result]
    assert openai_client.chat.completions.create(**fields).choices[0].message.content


def test_openai_responses(openai_client: openai.OpenAI) -> None:
    fields: Any = {"model": "demo", "input": GREETING[0]["content"], "temperature": 0, "max_output_tokens": LIMIT}
    answer = openai_client.responses.create(**fields)
    assert answer.output_text and answer.status == "completed"
    with openai_client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_text == answer.output_text
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
    called = openai_client.responses.create(
        model="demo", input=QUESTION, tools=[tool], tool_choice="required", temperature=0
    )
    call: Any = called.output[0]
    assert call.type == "function_call" and is_call(call.name, call.arguments)


def test_openai_parsed_and_refused(openai_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Extract name and age as JSON: Bob is 31 years old."}]
    answer = openai_client.chat.completions.parse(
        model="demo", messages=messages, response_format=Person, temperature=0
    )
    assert answer.choices[0].message.parsed == Person(name="Bob", age=31)
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="nothing", messages=messages)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        openai_client.chat.completions.create(model="demo", messages=messages, temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.request_id is not None
    assert [model.id for model in openai_client.models.list()] == ["demo"]
    assert len(openai_client.embeddings.create(model="demo", input="x").data[0].embedding) > 1


# ---- anthropic

GREEDY: Any = {"extra_body": {"temperature": 0}}
"""The client has no such parameter any more."""


@pytest.fixture(scope="module")
def anthropic_client(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base, api_key="none", max_retries=0)


def test_anthropic_chat_and_stream(anthropic_client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "demo", "messages": GREETING, "max_tokens": LIMIT, **GREEDY}
    answer = anthropic_client.messages.create(**fields)
    block: Any = answer.content[0]
    assert block.text and answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
    with anthropic_client.messages.stream(**fields) as stream:
        assert stream.get_final_text() == block.text
    counted = anthropic_client.messages.count_tokens(model="demo", messages=GREETING)
    assert counted.input_tokens > 0
    with pytest.raises(anthropic.BadRequestError) as wrong:
        anthropic_client.messages.create(**{**fields, "extra_body": {"temperature": 2}})
    assert wrong.value.request_id is not None and "temperature" in str(wrong.value)


def test_anthropic_tools(anthropic_client: anthropic.Anthropic) -> None:
    tools: Any = [{"name": "get_weather", "description": "Get the weather of a city", "input_schema": PARAMETERS}]
    choice: Any = {"type": "tool", "name": "get_weather"}
    fields: Any = {"model": "demo", "messages": MESSAGES, "tools": tools, "max_tokens": LIMIT, **GREEDY}
    answer = anthropic_client.messages.create(**fields, tool_choice=choice)
    call: Any = answer.content[-1]
    assert answer.stop_reason == "tool_use" and is_call(call.name, call.input)
    with anthropic_client.messages.stream(**fields, tool_choice={"type": "any"}) as stream:
        streamed: Any = stream.get_final_message().content[-1]
    assert is_call(streamed.name, streamed.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    again: Any = anthropic_client.messages.create(**{**fields, "messages": [*MESSAGES, *turns]})
    assert again.content


# ---- litellm


@pytest.fixture
def lite(url: str) -> dict[str, Any]:
    return {"model": "openai/demo", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": LIMIT}


def test_litellm_chat_and_stream(lite: dict[str, Any]) -> None:
    answer: Any = litellm.completion(**lite, messages=GREETING)
    text = answer.choices[0].message.content
    assert text and answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0
    chunks: Any = litellm.completion(**lite, messages=GREETING, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == text
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**lite, "temperature": -1}, messages=GREETING)


def test_litellm_tools(lite: dict[str, Any]) -> None:
    answer: Any = litellm.completion(**lite, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED)
    call = answer.choices[0].message.tool_calls[0].function
    assert is_call(call.name, call.arguments) and answer.choices[0].finish_reason == "tool_calls"
    chunks = list(litellm.completion(**lite, messages=MESSAGES, tools=TOOLS, tool_choice="required", stream=True))
    built: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    call = built.choices[0].message.tool_calls[0].function
    assert is_call(call.name, call.arguments)


def test_litellm_anthropic(server: Any) -> None:
    fields: Any = {"model": "anthropic/demo", "api_base": server.base, "api_key": "none", "max_tokens": LIMIT}
    answer: Any = litellm.completion(**fields, messages=GREETING, temperature=0)
    assert answer.choices[0].message.content


# ---- langchain-openai


@pytest.fixture
def langchain(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="demo", base_url=url, api_key="none", temperature=0, max_tokens=LIMIT, max_retries=0)


def test_langchain_chat_and_stream(langchain: ChatOpenAI) -> None:
    answer = langchain.invoke(GREETING[0]["content"])
    assert answer.content and answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    assert "".join(str(one.content) for one in langchain.stream(GREETING[0]["content"])) == answer.content
    assert len(langchain.batch(["One.", "Two."])) == 2


def test_langchain_tools(langchain: ChatOpenAI) -> None:
    bound = langchain.bind_tools(TOOLS, tool_choice="get_weather")
    answer: Any = bound.invoke(QUESTION)
    assert is_call(answer.tool_calls[0]["name"], answer.tool_calls[0]["args"])
    whole: Any = AIMessageChunk(content="")
    for chunk in langchain.bind_tools(TOOLS, tool_choice="any").stream(QUESTION):
        whole += chunk
    assert is_call(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])
    result = ToolMessage('{"temperature": 21}', tool_call_id=answer.tool_calls[0]["id"])
    assert langchain.bind_tools(TOOLS).invoke([HumanMessage(QUESTION), answer, result]).content


def test_langchain_structured(langchain: ChatOpenAI) -> None:
    long = langchain.model_copy(update={"max_tokens": 300})
    for method in ("json_schema", "function_calling"):
        found = long.with_structured_output(Person, method=method).invoke("Bob is 31 years old.")
        assert isinstance(found, Person)


# ---- llama-index-llms-openai-like


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"{city}: clear"


@pytest.fixture
def llama_index(url: str) -> OpenAILike:
    return OpenAILike(
        model="demo", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_tokens=LIMIT, max_retries=0, context_window=1024,
    )  # fmt: skip


def test_llama_index_chat_and_stream(llama_index: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content=GREETING[0]["content"])]
    answer = llama_index.chat(messages)
    assert answer.message.content
    assert "".join(one.delta or "" for one in llama_index.stream_chat(messages)) == answer.message.content
    assert llama_index.complete("What is 23 + 45?").text


def test_llama_index_tools(llama_index: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llama_index.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = llama_index.get_tool_calls_from_response(answer)
    assert is_call(call.tool_name, call.tool_kwargs)
    *_, last = llama_index.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = llama_index.get_tool_calls_from_response(last)
    assert is_call(call.tool_name, call.tool_kwargs)


# ---- instructor

MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]
EXTRACT: Any = [{"role": "user", "content": "Extract name and age as JSON: Bob is 31 years old."}]


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_instructor(openai_client: openai.OpenAI, mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai_client, mode=mode)
    fields: Any = {
        "model": "demo",
        "messages": EXTRACT,
        "response_model": Person,
        "temperature": 0,
        "max_tokens": LIMIT,
    }
    person = client.chat.completions.create(**fields, max_retries=0)
    assert isinstance(person, Person)
    *_, partial = client.chat.completions.create_partial(**fields)
    assert (partial.name, partial.age) == (person.name, person.age)


def test_instructor_chat(openai_client: openai.OpenAI) -> None:
    client = instructor.from_openai(openai_client)
    answer: Any = client.chat.completions.create(
        model="demo", messages=GREETING, response_model=None, temperature=0, max_tokens=LIMIT
    )
    assert answer.choices[0].message.content
    chunks: Any = client.chat.completions.create(
        model="demo", messages=GREETING, response_model=None, temperature=0, max_tokens=LIMIT, stream=True
    )
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == answer.choices[0].message.content
