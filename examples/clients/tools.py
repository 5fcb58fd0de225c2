"""A tool call: the model names a function, this program runs it, and the model answers with the result.

Run: quire serve, then: python examples/clients/tools.py (QUIRE_URL, if it is not http://127.0.0.1:8000)
"""

import json
import os

from openai import APIConnectionError, OpenAI

url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    raise SystemExit(f"no server answers at {url}: start `quire serve` first") from None


def get_weather(city: str) -> dict[str, object]:
    return {"city": city, "temperature": 17, "condition": "sunny"}


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
# "required" makes every model call a tool; with "auto" it may also answer by itself.
done = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", temperature=0, max_tokens=100
)
message = done.choices[0].message
assert message.tool_calls, "no tool was called"
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    print(f"{call.function.name}({call.function.arguments})")
    result = get_weather(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
done = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0, max_tokens=60)
print(done.choices[0].message.content)
