"""The torch-free half of a loaded model: names, tokenizer, chat template, end tokens, input processor.

Owns loading them from a checkpoint folder. Does not own weights (`engine/build`).
Invariant: a file system that does not answer stops neither the event loop nor the end of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from quire.compute.weights.hub import called, find_checkpoint
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.generation import GenerationDefaults, generation_defaults
from quire.config.model import read_arch
from quire.core.clock import Clock, MonotonicClock
from quire.core.errors import ConfigError, about
from quire.core.events import EngineReady
from quire.engine.input_processor import InputProcessor
from quire.text.chat_template import ChatTemplate
from quire.text.thinking import has_marks
from quire.text.tokenizer import HfTokenizer

EXIT_S = 2.0
"""Longest time that the end of the process waits for a frontend that is being loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frontend:
    """What a process needs to turn text into requests and deltas into text."""

    config: EngineConfig
    model_name: str
    tokenizer: HfTokenizer | None
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    """End tokens, and the sampling that the checkpoint proposes where a request says nothing."""
    clock: Clock = dataclasses.field(default_factory=MonotonicClock)
    engine: EngineReady | None = None
    arch: ModelArch | None = None

    @classmethod
    def load(cls, config: EngineConfig) -> Frontend:
        """Read the tokenizer, the chat template and the end tokens. Raises LoadError or ConfigError."""
        folder = find_checkpoint(config.model, config.revision, config.download_dir)
        arch = read_arch(folder, config.hf_overrides)
        tokenizer = load_tokenizer(config, folder, arch)
        template = None
        if tokenizer is not None:
            override = pathlib.Path(config.chat_template) if config.chat_template else None
            template = ChatTemplate.load(
                text_folder(config, folder), override, traces=not config.allow_special_tokens_in_text
            )
            if template is not None and not config.allow_special_tokens_in_text:
                tokenizer.learn_marks(template.sources.values())
        names = config.served_model_name or [config.model or folder.name]
        return cls(config, names[0], tokenizer, template, generation_defaults(config, folder, arch), arch=arch)

    def attach(self, ready: EngineReady) -> Frontend:
        """The same, knowing the engine's limits."""
        return dataclasses.replace(self, engine=ready)

    @property
    def ready(self) -> EngineReady:
        """The engine's limits (RuntimeError before `attach`)."""
        if self.engine is None:
            raise RuntimeError("attach() comes first")
        return self.engine

    @property
    def input_processor(self) -> InputProcessor:
        """Checks against this model and engine."""
        end_ids = list(self.generation.eos_token_ids)
        thinks = self.chat_template is not None and has_marks(self.chat_template.sources.values())
        return InputProcessor(self.config, self.ready, self.tokenizer, end_ids, self.clock, thinks)


async def load_beside(engine: Coroutine[Any, Any, EngineReady], config: EngineConfig) -> tuple[EngineReady, Frontend]:
    """Load the frontend while `engine` waits for the engine. Raises what either raises, and ConfigError when the
    frontend is not there `load_timeout` after the engine."""
    loading = _load_in_thread(config)
    starting = asyncio.create_task(_limited(engine, loading, config))
    try:
        return await asyncio.gather(starting, loading)
    finally:
        loading.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


async def _limited(
    engine: Coroutine[Any, Any, EngineReady], loading: asyncio.Future[Frontend], config: EngineConfig
) -> EngineReady:
    ready = await engine
    done, _ = await asyncio.wait((loading,), timeout=config.load_timeout or None)
    if not done:
        raise ConfigError(
            f"the tokenizer and chat template of {called(config.model)} were not loaded within "
            f"load_timeout = {config.load_timeout:g} s after the engine: mostly a disk or network file system that "
            "does not answer. Mend it, or allow more"
        )
    return ready


def _load_in_thread(config: EngineConfig) -> asyncio.Future[Frontend]:
    """`Frontend.load` in a daemon thread: those of `asyncio.to_thread` are joined at the end of the loop and of the
    process, however long they stand still."""
    loop = asyncio.get_running_loop()
    loading: asyncio.Future[Frontend] = loop.create_future()

    def settle(end: Callable[[Any], None], value: object) -> None:
        if not loading.done():
            end(value)

    def load() -> None:
        try:
            end: Callable[[Any], None] = loading.set_result
            value: object = Frontend.load(config)
        except BaseException as error:
            end, value = loading.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, end, value)
        atexit.unregister(thread.join)

    thread = threading.Thread(target=load, daemon=True, name="quire-frontend")
    atexit.register(thread.join, EXIT_S)  # a thread that only needs a moment is not torn out of a library
    thread.start()
    return loading


def load_tokenizer(config: EngineConfig, folder: pathlib.Path, arch: ModelArch) -> HfTokenizer | None:
    """The tokenizer of the model in `folder`, None with `skip_tokenizer_init`. Raises LoadError or ConfigError."""
    if config.skip_tokenizer_init:
        return None
    folder = text_folder(config, folder)
    with about("tokenizer", config.tokenizer) if config.tokenizer else contextlib.nullcontext():
        return HfTokenizer.load(folder, arch.vocab_size)


def text_folder(config: EngineConfig, folder: pathlib.Path) -> pathlib.Path:
    """Where the tokenizer is of the model in `folder`."""
    if not config.tokenizer:
        return folder
    with about("tokenizer", config.tokenizer):
        return find_checkpoint(config.tokenizer, config.revision, config.download_dir)
