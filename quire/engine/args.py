"""`EngineArgs` and `AsyncEngineArgs`: vLLM's way to write an `EngineConfig`, with its names and None for defaults."""

from __future__ import annotations

from typing import Unpack

from quire.config.engine import EngineConfig
from quire.config.keywords import EngineOptions
from quire.config.options import keyword_options
from quire.config.wording import in_python


def EngineArgs(model: str = "", **options: Unpack[EngineOptions]) -> EngineConfig:
    """The checked `EngineConfig` of these options, for `LLM.from_engine_args` and `AsyncLLM.create`.

    Raises ConfigError for an option that is not known or cannot be honoured, and says what to use.
    """
    with in_python(EngineConfig):
        return keyword_options(EngineConfig, {"model": model, **options}, "EngineArgs")


AsyncEngineArgs = EngineArgs
