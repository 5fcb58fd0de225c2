"""haystack: its generators for chat and for responses, a tool by force, and its agent."""

from __future__ import annotations

from typing import Any

from client import KEY, LIMIT, MODEL, SUM, V1, WEATHER, called, get_weather, give
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


def generator(kind: Any, **fields: Any) -> Any:
    return kind(model=MODEL, api_base_url=V1, api_key=Secret.from_token(KEY), generation_kwargs=fields)


chat = generator(OpenAIChatGenerator, temperature=0, max_tokens=LIMIT)
answer = chat.run([ChatMessage.from_user(SUM)])["replies"][0]
pieces: list[str] = []
chat.run([ChatMessage.from_user(SUM)], streaming_callback=lambda piece: pieces.append(piece.content))
tool = create_tool_from_function(get_weather)
forced = generator(OpenAIChatGenerator, temperature=0, max_tokens=LIMIT, tool_choice="required")
(call,) = forced.run([ChatMessage.from_user(WEATHER)], tools=[tool])["replies"][0].tool_calls
messages = Agent(chat_generator=chat, tools=[tool], max_agent_steps=3).run([ChatMessage.from_user(WEATHER)])["messages"]
responses = generator(OpenAIResponsesChatGenerator, temperature=0, max_output_tokens=LIMIT)
give(
    {
        "chat": answer.text,
        "n_tokens": answer.meta["usage"]["completion_tokens"],
        "stream": "".join(pieces),
        "n_pieces": len(pieces),
        "call": [call.tool_name, call.arguments],
        "cities": called(),
        "after_tool": messages[-1].text,
        "responses": responses.run([ChatMessage.from_user(SUM)])["replies"][0].text,
    }
)
