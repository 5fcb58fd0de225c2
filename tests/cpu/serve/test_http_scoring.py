"""/v1/score, /rerank and /pooling: cosines of vectors, in vLLM's, Jina's and Cohere's shapes, and hostile bodies."""

from __future__ import annotations

import base64
import math
from typing import Any

import httpx
import numpy as np
import pytest
from serve_fakes import MAX_MODEL_LEN
from test_http_hostile import check_error, http  # noqa: F401


def vector(text: str) -> list[float]:
    """What the fake model makes of a text of bytes: the ids of three, or 1."""
    from serve_fakes import byte_tokenizer

    return [float(token) for token in [*byte_tokenizer().encode(text), 1, 1][:3]]


def cosine(one: str, other: str) -> float:
    a, b = vector(one), vector(other)
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


@pytest.mark.parametrize("names", PAIRS)
def test_scores(http: httpx.Client, server: Any, names: tuple[str, str]) -> None:  # noqa: F811
    before = len(server.engine.submitted)
    for path in ("/score", "/v1/score"):
        answer = http.post(path, json={"model": "fake", names[0]: "a", names[1]: ["a", "zz", "!~"]}).json()
        assert [one["index"] for one in answer["data"]] == [0, 1, 2] and answer["object"] == "list"
        expected = [1.0, cosine("a", "zz"), cosine("a", "!~")]
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected)
        assert answer["usage"]["total_tokens"] == 6 and answer["model"] == "fake"
    assert len(server.engine.submitted) == before + 8, "each text is computed once"
    pairs = http.post("/score", json={"model": "fake", names[0]: ["a", "b"], names[1]: ["b", "cc"]}).json()
    assert [one["score"] for one in pairs["data"]] == pytest.approx([cosine("a", "b"), cosine("b", "cc")])


def test_documents_are_ordered(http: httpx.Client) -> None:  # noqa: F811
    documents = ["!~", "a", "zz"]
    body = {"model": "fake", "query": "a", "documents": documents}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = http.post(path, json=body).json()["results"]
        scores = [one["relevance_score"] for one in results]
        assert scores == sorted(scores, reverse=True) and results[0]["index"] == 1
        assert scores == pytest.approx([cosine("a", one["document"]["text"]) for one in results])
        assert all(one["document"]["text"] == documents[one["index"]] for one in results)
    assert len(http.post("/rerank", json={**body, "top_n": 2}).json()["results"]) == 2
    assert len(http.post("/rerank", json={**body, "top_n": 0}).json()["results"]) == 3
    bare = {**body, "documents": [{"text": text} for text in documents], "return_documents": False}
    assert [set(one) for one in http.post("/rerank", json=bare).json()["results"]] == [{"index", "relevance_score"}] * 3


def test_pooling(http: httpx.Client) -> None:  # noqa: F811
    body = {"model": "fake", "input": ["ab", "c"], "normalize": False}
    found = http.post("/pooling", json=body).json()
    assert [one["data"] for one in found["data"]] == [vector("ab"), vector("c")]
    assert {one["object"] for one in found["data"]} == {"pooling"} and found["id"].startswith("pool-")
    packed = http.post("/pooling", json={**body, "encoding_format": "base64", "task": "embed"}).json()["data"]
    assert np.frombuffer(base64.b64decode(packed[0]["data"]), "<f4").tolist() == vector("ab")
    unit = http.post("/pooling", json={"model": "fake", "input": "ab"}).json()["data"][0]["data"]
    assert np.linalg.norm(unit) == pytest.approx(1)


def test_a_fault_is_the_whole_requests(http: httpx.Client, server: Any) -> None:  # noqa: F811
    server.engine.fault = lambda request: len(request.prompt_token_ids) == 2
    body = {"model": "fake", "text_1": "a", "text_2": ["b", "cc"]}
    check_error(http.post("/score", json=body), 500)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {"text_1": "a"}, "text_1"), ("/score", {}, "text_1"),
    ("/score", {"text_1": "a", "documents": "b"}, "text_1"),
    ("/score", {"text_1": [], "text_2": ["b"]}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["b"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"), ("/score", {"text_1": "a", "text_2": [""]}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["x"] * 2000}, ""), ("/score", {"text_1": "a", "text_2": 5}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "x" * 500_000}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "x" * MAX_MODEL_LEN}, "text_2"),
    ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
    ("/score", {"text_1": "a", "text_2": "b", "priority": 3}, "priority"),
    ("/rerank", {"query": "a"}, "documents"), ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"), ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("/pooling", {"input": "a", "task": "classify"}, "task"), ("/pooling", {"input": "a", "task": "dance"}, "task"),
    ("/pooling", {"input": "a", "messages": []}, "messages"), ("/pooling", {}, "input"),
    ("/pooling", {"input": "a", "normalize": True, "use_activation": False}, "use_activation"),
    ("/pooling", {"input": [-1]}, "input"), ("/pooling", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[str(number) for number in range(len(REFUSED))])
def test_refused(http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:  # noqa: F811
    check_error(http.post(path, json={"model": "fake", **fields}), 400, param or None)
