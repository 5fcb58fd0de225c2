"""Vectors of prompts: `embed`, `encode` and `score` by vLLM's names. Owns what is made of the states of a prompt.

Does not own pooling over tokens (`compute/runner`) nor running (`engine/offline`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.core.adapters import LoRARequest
from quire.core.errors import EngineError, InvalidParameter
from quire.core.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    Vectors,
)
from quire.core.prompts import Prompts
from quire.core.request import Pooling, pooling_params
from quire.engine.offline import Bar, OfflineEngine, as_list, one_each, refuse_unused

Params = PoolingParams | Sequence[PoolingParams] | None


class VectorEngine(OfflineEngine):
    """What a user asks an engine for when tokens are not wanted."""

    def embed(
        self,
        prompts: Prompts,
        pooling: Pooling = Pooling.LAST,
        use_tqdm: Bar = True,
        *,
        pooling_params: Params = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt: `outputs.embedding` of length 1 (unless `use_activation` is False), `pooled` as it is.

        pooling: the state of the last token, or the mean over all.
        """
        refuse_unused(tokenization_kwargs=tokenization_kwargs)
        return [
            _with(one, EmbeddingOutput(_shaped(one, params)))
            for one, params in self._pooled(prompts, pooling, use_tqdm, pooling_params, lora_request)
        ]

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """`embed` with the vector as a tensor, `outputs.data`. pooling_task: "embed" (the default) alone."""
        refuse_unused(tokenization_kwargs=tokenization_kwargs)
        if pooling_task not in (None, "embed"):
            raise InvalidParameter(
                "pooling_task", pooling_task, "'embed'", "Classes, rewards and vectors of each token are not made here."
            )
        return [
            _with(one, PoolingOutput(torch.tensor(_shaped(one, params))))
            for one, params in self._pooled(prompts, Pooling.LAST, use_tqdm, pooling_params, lora_request)
        ]

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        chat_template: None = None,
    ) -> list[ScoringRequestOutput]:
        """How alike texts are, as the cosine of their vectors: one with each of several, or pair by pair."""
        refuse_unused(tokenization_kwargs=tokenization_kwargs, chat_template=chat_template)
        first, second = as_list(data_1), as_list(data_2)
        if not first or (len(first) != 1 and len(first) != len(second)):
            raise InvalidParameter("data_1", f"{len(first)} texts", f"one text, or as many as data_2 ({len(second)})")
        made = [_with(one, _shaped(one, params)) for one, params in self._pooled(
            [*first, *second], Pooling.LAST, use_tqdm, pooling_params, lora_request
        )]  # fmt: skip
        n_first = len(first)
        firsts = made[:n_first] * (len(second) if n_first == 1 else 1)
        return [
            PoolingRequestOutput(
                request_id=f"{one.request_id},{other.request_id}",
                outputs=ScoringOutput(cosine(one.outputs, other.outputs)),
                prompt_token_ids=one.prompt_token_ids + other.prompt_token_ids,
                num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
            )
            for one, other in zip(firsts, made[n_first:], strict=True)
        ]

    def _pooled(
        self, prompts: Prompts, pooling: Pooling, use_tqdm: Bar, params: Params, adapter: LoRARequest | None
    ) -> list[tuple[RequestOutput, PoolingParams]]:
        items = as_list(prompts)
        if params is None or isinstance(params, PoolingParams):
            each = [params or PoolingParams()] * len(items)
        else:
            each = one_each("pooling_params", params, len(items), "a PoolingParams")
        opened = [self._prepare(item, pooling_params(), pooling, adapter=adapter) for item in items]
        return list(zip(self._finished(opened, use_tqdm), each, strict=True))


def _with(one: RequestOutput, outputs: Vectors) -> PoolingRequestOutput[Vectors]:
    return PoolingRequestOutput(
        request_id=one.request_id,
        outputs=outputs,
        prompt_token_ids=one.prompt_token_ids,
        num_cached_tokens=one.num_cached_tokens,
        finished=one.finished,
        pooled=one.pooled or [],
    )


def _shaped(one: RequestOutput, params: PoolingParams) -> list[float]:
    """The vector cut and divided by its length. InvalidParameter for more dimensions than it has, EngineError if there
    is none."""
    vector = one.pooled
    if vector is None:
        raise EngineError(f"the engine failed at a prompt: {one.outputs[0].failure}")
    if params.dimensions is not None:
        if not isinstance(params.dimensions, int) or not 0 < params.dimensions <= len(vector):
            raise InvalidParameter("dimensions", params.dimensions, f"an integer between 1 and {len(vector)}")
        vector = vector[: params.dimensions]
    length = math.sqrt(math.fsum(number * number for number in vector))
    if params.use_activation is False or not length:
        return list(vector)
    return [number / length for number in vector]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """-1 to 1; 0 if one of them is zero everywhere."""
    lengths = math.sqrt(math.fsum(x * x for x in one)) * math.sqrt(math.fsum(x * x for x in other))
    return math.fsum(x * y for x, y in zip(one, other, strict=True)) / lengths if lengths else 0.0
