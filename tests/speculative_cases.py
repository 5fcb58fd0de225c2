"""Requests and drafters for tests of drafts on the demo model, on any device."""

from __future__ import annotations

import pathlib
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams

COPIES = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 4
TALKS = "What is the capital of France, and who wrote its longest book?"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0, "seed": 5},
    "top": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "seed": 6},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.6, "repetition_penalty": 1.2, "seed": 7},
    "bias": {"temperature": 0.0, "logit_bias": {260: 5.0}, "bad_words": ["add"]},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "stop": {"temperature": 0.0, "stop": ["sub("]},
    "several": {"temperature": 1.0, "seed": 9, "n": 3},
    "grammar": {"temperature": 1.0, "seed": 4, "structured_outputs": StructuredOutputsParams(regex="[a-d]{3,40}")},
    "schema": {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "schemas": {"temperature": 1.0, "seed": 8, "n": 2, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "allowed": {"temperature": 1.0, "seed": 3, "allowed_token_ids": list(range(300, 420))},
}
DRAFT = pathlib.Path(__file__).resolve().parents[1] / "demo" / "draft"
HEAD = DRAFT.with_name("head")
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"model": str(DRAFT), "num_speculative_tokens": 5},
    "eagle3": {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5},
    "mtp": {"method": "mtp", "model": str(DRAFT.with_name("mtp")), "num_speculative_tokens": 5},
}
TREES: dict[str, dict[str, Any]] = {
    "suffix tree": METHODS["suffix"] | {"branching": 3},
    "eagle3 tree": METHODS["eagle3"] | {"num_speculative_tokens": 8, "branching": 2},
    "mtp fixed tree": METHODS["mtp"]
    | {"num_speculative_tokens": None, "speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)]"},
}


def answers(llm: LLM, **wishes: Any) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 70, "ignore_eos": "structured_outputs" not in wishes} | wishes)
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs)
        for output in llm.generate([COPIES, TALKS], params)
        for one in output.outputs
    ]
