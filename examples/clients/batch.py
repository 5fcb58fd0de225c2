"""A batch: a file of requests is uploaded, answered in the background, and its answers are fetched.

Run: quire serve --data-dir FOLDER, then: python examples/clients/batch.py (QUIRE_URL, if not http://127.0.0.1:8000)
"""

import json
import os
import time

from openai import APIConnectionError, OpenAI

url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    raise SystemExit(f"no server answers at {url}: start `quire serve` first") from None
lines = [
    {
        "custom_id": f"sum-{n}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"What is {n} + 45?"}],
            "temperature": 0,
            "max_tokens": 48,
        },
    }
    for n in range(20, 30)
]
text = "\n".join(json.dumps(line) for line in lines)
sent = client.files.create(file=("sums.jsonl", text.encode()), purpose="batch")
batch = client.batches.create(input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "cancelled", "expired"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed" and batch.output_file_id, batch
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
assert {answer["custom_id"] for answer in answers} == {line["custom_id"] for line in lines}
for answer in sorted(answers, key=lambda each: each["custom_id"]):
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
