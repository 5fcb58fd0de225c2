"""LangChain over Quire: a streamed answer, and an object of a class. pip install langchain-openai

Run: quire serve, then: python examples/clients/langchain_chat.py (QUIRE_URL, if it is not http://127.0.0.1:8000)
"""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url = os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1"
key = os.environ.get("OPENAI_API_KEY", "none")
model = ChatOpenAI(base_url=url, api_key=key, model=os.environ.get("MODEL", "demo"), temperature=0, max_tokens=100)
answer = ""
for chunk in model.stream("What is 23 + 45?"):
    answer += chunk.text
    print(chunk.text, end="", flush=True)
print()
assert answer


class Person(BaseModel):
    """What a sentence says of somebody."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=130)


person = model.with_structured_output(Person, method="json_schema").invoke(
    "Anna is 31 years old and lives in Oslo. Give name and age as JSON."
)
assert isinstance(person, Person)
print(person)
