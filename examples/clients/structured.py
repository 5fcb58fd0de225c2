"""JSON that follows a schema, whatever the model would have said, and a choice of words.

Run: quire serve, then: python examples/clients/structured.py (QUIRE_URL, if it is not http://127.0.0.1:8000)
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
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
done = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Anna is 31 years old and lives in Oslo. Give name, age and city as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    temperature=0,
    max_tokens=100,
)
person = json.loads(done.choices[0].message.content or "")
assert set(person) == {"name", "age", "city"} and 0 <= person["age"] <= 130
print(person)

done = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is Python a compiled language?"}],
    extra_body={"structured_outputs": {"choice": ["yes", "no", "it depends"]}},
)
assert done.choices[0].message.content in ("yes", "no", "it depends")
print(done.choices[0].message.content)
