"""Quire: an LLM inference and serving engine. Public names are loaded when first used.

from quire import LLM, SamplingParams
outputs = LLM().generate("def fibonacci(n):", SamplingParams(max_tokens=64))
"""

from __future__ import annotations

import importlib

from quire.core.version import __version__

TYPE_CHECKING = False  # as that of typing, which takes as long to import as all that comes before `main` guards Ctrl-C

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.core.adapters import LoRARequest
    from quire.core.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.core.errors import QuireError
    from quire.core.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.core.prompts import PromptType, TextPrompt, TokensPrompt
    from quire.core.sampling import SamplingParams
    from quire.core.structured import StructuredOutputsParams
    from quire.engine.args import AsyncEngineArgs, EngineArgs
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM

_PLACES = {
    "LLM": "quire.engine.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "SamplingParams": "quire.core.sampling",
    "StructuredOutputsParams": "quire.core.structured",
    "BeamSearchParams": "quire.core.beams",
    "BeamSearchOutput": "quire.core.beams",
    "BeamSearchSequence": "quire.core.beams",
    "LoRARequest": "quire.core.adapters",
    "RequestOutput": "quire.core.outputs",
    "CompletionOutput": "quire.core.outputs",
    "PoolingParams": "quire.core.outputs",
    "PoolingOutput": "quire.core.outputs",
    "PoolingRequestOutput": "quire.core.outputs",
    "EmbeddingOutput": "quire.core.outputs",
    "EmbeddingRequestOutput": "quire.core.outputs",
    "ScoringOutput": "quire.core.outputs",
    "ScoringRequestOutput": "quire.core.outputs",
    "PromptType": "quire.core.prompts",
    "TextPrompt": "quire.core.prompts",
    "TokensPrompt": "quire.core.prompts",
    "EngineArgs": "quire.engine.args",
    "AsyncEngineArgs": "quire.engine.args",
    "EngineConfig": "quire.config.engine",
    "QuireError": "quire.core.errors",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
