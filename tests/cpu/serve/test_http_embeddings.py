"""/v1/embeddings with openai-python, and hostile bodies."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from serve_fakes import LOGITS_WIDTH, MAX_MODEL_LEN
from test_http_hostile import check_error, http  # noqa: F401

from quire.core.request import Pooling

PATH = "/v1/embeddings"


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0)


def test_vectors(server: Any, client: openai.OpenAI) -> None:
    """The client asks for base64 by itself; both forms are the same numbers, of length 1."""
    prompts = [[3, 4, 12], [5], [1, 1]]
    answer = client.embeddings.create(model="fake", input=prompts)
    plain = client.embeddings.create(model="fake", input=prompts, encoding_format="float")
    assert [one.index for one in answer.data] == [0, 1, 2] and answer.object == "list"
    assert np.allclose(answer.data[0].embedding, np.array([3, 4, 12]) / 13)
    for one, other in zip(answer.data, plain.data, strict=True):
        assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))
        assert abs(np.linalg.norm(one.embedding) - 1) < 1e-6
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6
    assert all(request.pooling is Pooling.LAST and request.max_tokens == 1 for request in server.engine.submitted[-6:])


def test_texts_and_options(server: Any, client: openai.OpenAI) -> None:
    ids = server.llm.tokenizer.encode("ab")
    extra = {"normalize": False, "pooling": "mean", "cache_salt": "s"}
    answer = client.embeddings.create(model="fake", input="ab", encoding_format="float", extra_body=extra)
    assert answer.data[0].embedding == [*ids, 1]
    assert server.engine.submitted[-1].pooling is Pooling.MEAN and server.engine.submitted[-1].cache_salt == "s"
    with server.client() as plain:
        body = {"model": "fake", "input": ["ab", "cd"], "encoding_format": "base64"}
        data = plain.post(PATH, json=body).json()["data"]
    assert len(data) == 2 and len(base64.b64decode(data[0]["embedding"])) == 12


def test_a_fault(server: Any, client: openai.OpenAI) -> None:
    server.engine.fault = lambda request: len(request.prompt_token_ids) == 2
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model="fake", input=[[1], [1, 2], [3]])
    assert client.embeddings.create(model="fake", input=[[1], [3]]).data


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [[]]}, "input"),
    ({"input": ["a", ""]}, "input"), ({"input": [1, "a"]}, "input"), ({"input": [-1]}, "input"),
    ({"input": [LOGITS_WIDTH]}, "input"), ({"input": [1] * MAX_MODEL_LEN}, "input"),
    ({"input": ["x"] * 1025}, "input"), ({"input": ["x"] * 1_000_000}, "input"), ({"input": "x" * 500_000}, "input"),
    ({"input": 5}, "input"), ({"dimensions": 64}, "dimensions"), ({"encoding_format": "int8"}, "encoding_format"),
    ({"encoding_format": 5}, "encoding_format"), ({"pooling": "cls"}, "pooling"), ({"normalize": "yes"}, "normalize"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"), ({"priority": 3}, "priority"),
    ({"user": "x" * 1_000_000}, "user"), ({"cache_salt": "x" * 300}, "cache_salt"), ({"stream": True}, "stream"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
def test_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    check_error(http.post(PATH, json={"model": "fake", "input": "x", **fields}), 400, param)
