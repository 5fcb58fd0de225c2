"""Cures in Python name keyword arguments, and no flag is left in any message about an option."""

from __future__ import annotations

import re

import pytest

from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN, OptionShape, State
from quire.config.options import describe
from quire.config.wording import in_python, keywords_for_flags
from quire.core.errors import ConfigError
from quire.engine.args import EngineArgs

OPTIONS = {option.name: option for option in describe(EngineConfig)}


@pytest.mark.parametrize("message, expected", [
    ("a shorter --max-model-len, or --device cpu", "a shorter max_model_len, or device='cpu'"),
    ("  --max-model-len 2048", "  max_model_len=2048"),
    ("  --kv-cache-memory-bytes 512MiB", "  kv_cache_memory_bytes='512MiB'"),
    ("--max-num-batched-tokens of the longest prompt", "max_num_batched_tokens of the longest prompt"),
    ("pass --chat-template FILE", "pass chat_template=FILE"),
    ("or use --enforce-eager (--no-enable-prefix-caching)", "or use enforce_eager=True (enable_prefix_caching=False)"),
    ("--hf-overrides '{\"sliding_window\": null}'", "hf_overrides={'sliding_window': None}"),
    ("--access-log logs", "`quire serve` --access-log logs"),
    ("`hf download N --revision R` by --tokenizer", "`hf download N --revision R` by tokenizer"),
    ("a/--b '--seed' x--seed", "a/--b '--seed' x--seed"),
    ("--gpu-memory-utilization 0.95", "gpu_memory_utilization=0.95"),
    ("--quantization, or", "quantization, or"),
])  # fmt: skip
def test_flags_are_keywords(message: str, expected: str) -> None:
    assert keywords_for_flags(message, OPTIONS) == expected


def test_an_error_keeps_what_it_is() -> None:
    with pytest.raises(ConfigError) as caught, in_python(EngineConfig):
        raise ConfigError("lower --seed 3", param="seed")
    assert (caught.value.message, caught.value.param, str(caught.value)) == ("lower seed=3", "seed", "lower seed=3")
    same = ConfigError("no flag")
    with pytest.raises(ConfigError) as caught, in_python(EngineConfig):
        raise same
    assert caught.value is same


@pytest.mark.parametrize("name", sorted(set(FOREIGN) - set(OPTIONS)))
def test_no_refusal_in_python_names_a_flag_of_the_engine(name: str) -> None:
    option = FOREIGN[name]
    values = {OptionShape.SWITCH: [True, False], OptionShape.LIST: [["surprising"]]}.get(option.shape, ["surprising"])
    for value in values:
        try:
            EngineArgs(**{name: value})
        except ConfigError as error:
            flags = re.findall(r"--[a-z][a-z-]+", re.sub("`[^`]*` --[a-z-]+|`[^`]*`", "", error.message))
            assert flags == [], error.message
        else:
            assert option.state is not State.REFUSED or value is False
