"""anthropic: its tool runner, whole and streamed, and its threads, which ask the server to keep the conversation."""

from __future__ import annotations

import anthropic
from client import BASE, KEY, LIMIT, MODEL, SUM, WEATHER, called, get_weather, give

client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
tool = anthropic.beta_tool(get_weather)
ask = {"model": MODEL, "max_tokens": LIMIT, "messages": [{"role": "user", "content": WEATHER}], "tools": [tool]}
greedy = {"extra_body": {"temperature": 0}}
whole = client.beta.messages.tool_runner(**ask, **greedy).until_done()
whole_cities = called()
*_, last = client.beta.messages.tool_runner(**ask, **greedy, stream=True)
streamed = last.get_final_message()
thread = client.beta.messages.thread(model=MODEL, max_tokens=LIMIT)
turns = [thread.send({"role": "user", "content": text}) for text in (SUM, "What is 2 + 3?", SUM)]
give(
    {
        "after_tool": whole.content[-1].text,
        "cities": whole_cities,
        "streamed_after_tool": streamed.content[-1].text,
        "streamed_cities": called(),
        "thread": [turn.content[0].text for turn in turns],
        "n_messages": len(thread.messages),
    }
)
