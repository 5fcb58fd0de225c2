"""openai-agents: its runner over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
from client import KEY, LIMIT, MODEL, SUM, V1, WEATHER, called, get_weather, give


async def tried(model: Any) -> dict[str, Any]:
    settings = agents.ModelSettings(temperature=0, max_tokens=LIMIT)
    agent = agents.Agent(name="A", model=model, model_settings=settings)
    answer = await agents.Runner.run(agent, SUM)
    run = agents.Runner.run_streamed(agent, SUM)
    pieces = []
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    forced = agents.ModelSettings(temperature=0, max_tokens=LIMIT, tool_choice="required")
    worker = agents.Agent(name="B", model=model, model_settings=forced, tools=[agents.function_tool(get_weather)])
    used = await agents.Runner.run(worker, WEATHER)
    return {
        "chat": answer.final_output,
        "n_tokens": answer.context_wrapper.usage.output_tokens,
        "stream": "".join(pieces),
        "n_pieces": len(pieces),
        "cities": called(),
        "after_tool": used.final_output,
    }


async def main() -> None:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    chat = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
    responses = agents.OpenAIResponsesModel(model=MODEL, openai_client=client)
    give({"chat": await tried(chat), "responses": await tried(responses)})


asyncio.run(main())
