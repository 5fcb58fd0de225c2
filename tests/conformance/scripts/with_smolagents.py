"""smolagents: its model, whole and streamed, and its agent that calls tools. The agent's own prompt is 1,300 tokens."""

from __future__ import annotations

import smolagents
from client import KEY, LIMIT, MODEL, SUM, V1, WEATHER, called, get_weather, give

model = smolagents.OpenAIModel(model_id=MODEL, api_base=V1, api_key=KEY, temperature=0, max_tokens=LIMIT)
question = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]
answer = model.generate(question)
pieces = [piece.content or "" for piece in model.generate_stream(question)]
weather = smolagents.tool(get_weather)
ask = [{"role": "user", "content": [{"type": "text", "text": WEATHER}]}]
call = model.generate(ask, tools_to_call_from=[weather]).tool_calls[0].function
agent = smolagents.ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
final = agent.run(WEATHER)
give(
    {
        "chat": answer.content,
        "n_tokens": answer.token_usage.output_tokens,
        "stream": "".join(pieces),
        "n_pieces": len(pieces),
        "call": [call.name, call.arguments],
        "final": str(final),
        "n_steps": len(agent.memory.steps),
        "cities": called(),
    }
)
