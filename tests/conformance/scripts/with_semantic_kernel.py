"""semantic-kernel: its chat completion, whole and streamed, and a function of a plugin by force."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from client import CALLED, KEY, LIMIT, MODEL, SUM, V1, WEATHER, called, give
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather:
    @kernel_function(description="Get the weather of a city")
    def get_weather(self, city: str) -> str:
        CALLED.append(city)
        return "clear"


def history(text: str) -> ChatHistory:
    found = ChatHistory()
    found.add_user_message(text)
    return found


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    chat = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client, service_id="quire")
    plain = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=LIMIT)
    answer: Any = await chat.get_chat_message_content(history(SUM), plain)
    pieces = [str(piece) async for piece in chat.get_streaming_chat_message_content(history(SUM), plain)]
    kernel = Kernel()
    kernel.add_plugin(Weather(), "w")
    forced = OpenAIChatPromptExecutionSettings(
        temperature=0, max_tokens=LIMIT, function_choice_behavior=FunctionChoiceBehavior.Required()
    )
    used = await chat.get_chat_message_content(history(WEATHER), forced, kernel=kernel)
    give(
        {
            "chat": str(answer),
            "n_tokens": answer.metadata["usage"].completion_tokens,
            "stream": "".join(pieces),
            "n_pieces": len(pieces),
            "cities": called(),
            "after_tool": str(used),
        }
    )


asyncio.run(main())
