"""The torch-free half of a loaded model: names, tokenizer, chat template, end tokens, intake.

Owns loading them from a checkpoint folder. Does not own weights (`engine/build`).
"""

from __future__ import annotations

import dataclasses
import pathlib

from quire.compute.weights.hub import find_checkpoint
from quire.config.arch import ModelArch, read_arch
from quire.config.engine import EngineConfig
from quire.config.generation import GenerationDefaults, read_generation
from quire.core.clock import Clock, MonotonicClock
from quire.core.events import EngineReady
from quire.engine.intake import Intake
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import GrammarChecker, GrammarCompiler
from quire.text.tokenizer import HfTokenizer


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

    @classmethod
    def load(cls, config: EngineConfig) -> Frontend:
        """Read the tokenizer, the chat template and the end tokens. Raises LoadError or ConfigError."""
        folder = find_checkpoint(config.model, config.revision)
        arch = read_arch(folder)
        tokenizer = load_tokenizer(config, folder, arch)
        template = None
        if tokenizer is not None:
            text_folder = _text_folder(config, folder)
            template = ChatTemplate.load(
                text_folder, pathlib.Path(config.chat_template) if config.chat_template else None
            )
        names = config.served_model_name or [config.model or folder.name]
        return cls(config, names[0], tokenizer, template, read_generation(folder, arch))

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
    def intake(self) -> Intake:
        """Checks against this model and engine."""
        end_ids = list(self.generation.eos_token_ids)
        grammars = None
        if self.tokenizer is not None:
            grammars = GrammarChecker(GrammarCompiler(self.tokenizer, self.ready.logits_width, end_ids, cache_bytes=0))
        return Intake(self.config, self.ready, self.tokenizer, end_ids, self.clock, grammars)


def load_tokenizer(config: EngineConfig, folder: pathlib.Path, arch: ModelArch) -> HfTokenizer | None:
    """The tokenizer of the model in `folder`, None with `skip_tokenizer_init`. Raises LoadError or ConfigError."""
    if config.skip_tokenizer_init:
        return None
    return HfTokenizer.load(_text_folder(config, folder), arch.vocab_size)


def _text_folder(config: EngineConfig, folder: pathlib.Path) -> pathlib.Path:
    return find_checkpoint(config.tokenizer, config.revision) if config.tokenizer else folder
