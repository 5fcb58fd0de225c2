"""Vectors of texts and how near they are to each other. They are a generative model's: for search take one made for it.

Run: quire serve, then: python examples/clients/embeddings.py (QUIRE_URL, if it is not http://127.0.0.1:8000)
"""

import math
import os

from openai import APIConnectionError, OpenAI

url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1"
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    raise SystemExit(f"no server answers at {url}: start `quire serve` first") from None
texts = ["def read_file(path):", "def write_file(path, text):", "What is 23 + 45?"]
vectors = [item.embedding for item in client.embeddings.create(model=model, input=texts).data]
assert len(vectors) == len(texts) and len(set(map(len, vectors))) == 1


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


assert abs(cosine(vectors[0], vectors[0]) - 1) < 1e-6
print(f"{len(vectors[0])} numbers each")
for i, text in enumerate(texts):
    print(" ".join(f"{cosine(vectors[i], vector):6.3f}" for vector in vectors), text)
