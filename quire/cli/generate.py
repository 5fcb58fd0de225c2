"""`quire generate [MODEL] --prompt TEXT`: completes prompts in this process and prints the text as it comes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TextIO

from quire.cli.model import add_engine_flags, engine_config, load_llm
from quire.cli.sampling import SamplingFlags, check_sampling, sampling_params
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags
from quire.config.shapes import BUNDLED, PREFIX
from quire.core.adapters import LoRARequest, lora_module
from quire.core.errors import ConfigError, EngineError, shown
from quire.core.sampling import OutputKind

if TYPE_CHECKING:
    from quire.core.outputs import RequestOutput
    from quire.engine.llm import LLM

_ORG_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire generate [MODEL] --prompt TEXT [options]"
    parser.add_argument(
        "-p", "--prompt", action="append", metavar="TEXT", default=[],
        help="text to go on from; may be given several times; without it standard input is the prompt",
    )  # fmt: skip
    add_flags(parser, SamplingFlags, title="sampling options")
    add_engine_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Print the completions; returns the exit code."""
    if not namespace.prompt:
        check_model_argument(namespace.model_argument)
    prompts = namespace.prompt or [read_prompt(sys.stdin)]
    check_sampling(namespace)
    config = engine_config(namespace, disable_log_stats=True)
    adapter = adapter_of(config)
    llm = load_text_llm(config)
    try:
        params = sampling_params(namespace, OutputKind.DELTA, llm)
        if len(prompts) == 1 and params.n == 1:
            print_stream(llm.stream(prompts[0], params, adapter), sys.stdout)
        else:
            params.output_kind = OutputKind.FINAL_ONLY
            found = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty(), lora_request=adapter)
            print_all(found, sys.stdout)
    finally:
        llm.shutdown()
    return 0


def check_model_argument(model: str) -> None:
    """ConfigError if MODEL, given without --prompt, can be no model: it is most likely the prompt."""
    if not model or model in BUNDLED or model.startswith(PREFIX) or _ORG_NAME.fullmatch(model):
        return
    if os.path.exists(os.path.expanduser(model)):  # unlike Path.exists it takes text too long for a path
        return
    raise ConfigError(
        f"MODEL {shown(model)} is neither a folder nor a hub name such as org/name;"
        f" did you mean --prompt {shown(model)}?"
    )


def adapter_of(config: EngineConfig) -> LoRARequest | None:
    """The adapter of --lora-modules, which all answers of the command have; None: the model's own. ConfigError if there
    are several."""
    names = [name for name, _ in map(lora_module, config.lora_modules)]
    if len(names) > 1:
        raise ConfigError(
            f"lora_modules names {len(names)} adapters, and this command answers as one: give one of them, or serve all"
            " with quire serve",
            param="lora_modules",
        )
    return LoRARequest(names[0]) if names else None


def load_text_llm(config: EngineConfig) -> LLM:
    """The offline engine of a command that works on text; ConfigError if `config` leaves the tokenizer out."""
    if config.skip_tokenizer_init:
        if config.model.startswith(PREFIX):
            raise ConfigError(
                f"{config.model} has no tokenizer, which this command needs: name one with --tokenizer, measure it with"
                f" quire bench throughput {config.model}, or send token ids to quire serve {config.model}"
            )
        raise ConfigError(
            "this command needs a tokenizer: leave --skip-tokenizer-init out, or send token ids to a server"
        )
    return load_llm(config)


def read_prompt(stream: TextIO) -> str:
    """All of standard input as the prompt; ConfigError if a person would have to type it or it is empty."""
    if stream.isatty():
        raise ConfigError("no prompt: give --prompt TEXT, or pipe the text into this command")
    text = stream.read()
    if not text:
        raise ConfigError("the prompt on standard input is empty")
    return text


def print_stream(outputs: Iterator[RequestOutput], target: TextIO) -> str:
    """Print each delta as it comes, and a newline at the end; returns the whole text. EngineError if it failed."""
    text = ""
    for output in outputs:
        part = output.outputs[0]
        text += part.text
        target.write(part.text)
        target.flush()
        if part.finish_reason == "error":
            raise EngineError(f"the engine failed while answering: {part.failure}")
    target.write("\n")
    return text


def print_all(outputs: list[RequestOutput], target: TextIO) -> None:
    """Print finished completions under headings, in the order of their prompts."""
    for i, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            part = f", {completion.index + 1} of {len(output.outputs)}" if len(output.outputs) > 1 else ""
            target.write(f"--- prompt {i} of {len(outputs)}{part}\n{completion.text}\n")
