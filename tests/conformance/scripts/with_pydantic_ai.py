"""pydantic-ai: its models of OpenAI's chat, OpenAI's responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any

from client import BASE, KEY, LIMIT, MODEL, SUM, V1, WEATHER, called, get_weather, give
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


async def tried(model: Any, settings: Any) -> dict[str, Any]:
    agent = Agent(model, model_settings=settings)
    answer = await agent.run(SUM)
    async with agent.run_stream(SUM) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    used = await Agent(model, tools=[get_weather], model_settings=settings).run(WEATHER)
    extract = "Extract name and age: Bob is 31 years old."
    shaped = await Agent(model, output_type=ToolOutput(Person), model_settings=settings).run(extract)
    return {
        "chat": answer.output,
        "n_tokens": answer.usage.output_tokens,
        "stream": "".join(pieces),
        "n_pieces": len(pieces),
        "cities": called(),
        "after_tool": used.output,
        "person": shaped.output.model_dump(),
    }


async def main() -> None:
    greedy = {"max_tokens": LIMIT, "temperature": 0}
    openai = OpenAIProvider(base_url=V1, api_key=KEY)
    anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key=KEY))
    give(
        {
            "chat": await tried(OpenAIChatModel(MODEL, provider=openai), greedy),
            "responses": await tried(OpenAIResponsesModel(MODEL, provider=openai), greedy),
            "anthropic": await tried(anthropic, {**greedy, "extra_body": {"temperature": 0}}),
        }
    )


asyncio.run(main())
