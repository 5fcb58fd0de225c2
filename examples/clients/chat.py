"""A conversation, streamed, with the openai package.

Run: quire serve, then: python examples/clients/chat.py (QUIRE_URL, if it is not http://127.0.0.1:8000)
"""

import os

from openai import APIConnectionError, OpenAI

url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    raise SystemExit(f"no server answers at {url}: start `quire serve` first") from None
messages = []
for question in ("What is 23 + 45?", "How many minutes are in 3 hours?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer = ""
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            answer += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            used, details = chunk.usage, chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details else 0
            print(f"\n  ({used.prompt_tokens} tokens in, {cached} of them cached, {used.completion_tokens} out)")
    assert answer, "the model said nothing"
    messages.append({"role": "assistant", "content": answer})
