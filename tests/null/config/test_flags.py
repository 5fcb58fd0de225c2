"""Flags made from option structs: spelling, checks, suggestions, defaults."""

from __future__ import annotations

import argparse
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_flags, in_flags, options_list, read_flags
from quire.config.options import describe
from quire.core.errors import ConfigError, EngineError


class Sample(msgspec.Struct, kw_only=True):
    n_things: Annotated[int, Meta(description="How many, 100 % of them.", ge=1, le=9)] = 3
    share: Annotated[float, Meta(description="A share.", gt=0, le=1)] = 0.5
    names: Annotated[list[str], Meta(description="Names.")] = []
    sizes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(description="Sizes.")] = []
    kind: Annotated[Literal["zeta", "alpha"], Meta(description="A kind.")] = "zeta"
    page: Annotated[Literal[1, 16], Meta(description="A page.")] = 16
    seed: Annotated[int | None, Meta(description="A seed.")] = None
    factor: Annotated[float, Meta(description="A factor.", ge=0)] = 0.0
    rate: Annotated[float, Meta(description="A rate.", gt=0, extra={"may_be_inf": True})] = 1.0
    enable_it: Annotated[bool, Meta(description="A switch.")] = True


def parse(*words: str, options: type[msgspec.Struct] = Sample) -> msgspec.Struct:
    parser = FlagParser(prog="tool")
    add_flags(parser, options, title="options")
    return read_flags(parser.parse_args(list(words)), options)


def refused(capsys: pytest.CaptureFixture[str], *words: str, options: type[msgspec.Struct] = Sample) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*words, options=options)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_nothing_given_leaves_the_defaults() -> None:
    assert parse() == Sample()
    assert parse(options=EngineConfig) == EngineConfig()


def test_only_some_numbers_may_be_infinite() -> None:
    """JSON, in which a server passes its options on, has no word for them."""
    assert parse("--rate", "inf") == Sample(rate=float("inf"))


def test_every_type_is_converted() -> None:
    made = parse(
        "--n-things", "4", "--share", "0.25", "--names", "a", "b", "--sizes", "1", "2", "--kind", "alpha",
        "--page", "1", "--seed", "7", "--no-enable-it",
    )  # fmt: skip
    assert made == Sample(
        n_things=4, share=0.25, names=["a", "b"], sizes=[1, 2], kind="alpha", page=1, seed=7, enable_it=False
    )


@pytest.mark.parametrize("words, parts", [
    (["--n-things", "10"], ["--n-things", "'10'", "an integer between 1 and 9"]),
    (["--n-things", "x"], ["--n-things", "'x'", "an integer between 1 and 9"]),
    (["--n-things=2.5"], ["'2.5'", "an integer"]),
    (["--share", "0"], ["--share", "'0'", "a number above 0 and of at most 1"]),
    (["--share", "nan"], ["--share", "'nan'"]),
    (["--factor", "inf"], ["--factor", "'inf'", "it must be finite, a number of at least 0"]),
    (["--sizes", "1", "-3"], ["--sizes", "'-3'", "an integer of at least 0"]),
    (["--kind", "alpa"], ["one of zeta, alpha", "did you mean alpha?"]),
    (["--page", "2"], ["one of 1, 16"]),
    (["--n-thing", "2"], ["unknown option --n-thing", "did you mean --n-things?"]),
    (["--n_thngs=2"], ["unknown option --n_thngs", "did you mean --n-things?"]),
    (["--no-enabel-it"], ["did you mean --no-enable-it?"]),
    (["--qqqqqq"], ["unknown option --qqqqqq\n"]),
    (["stray"], ["unexpected argument 'stray'"]),
    (["--names"], ["--names", "expected at least one argument"]),
])  # fmt: skip
def test_a_bad_word_exits_with_2_and_says_why(
    capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]
) -> None:
    message = refused(capsys, *words)
    assert message.startswith("tool: error: ") and len(message.splitlines()) == 2
    for part in parts:
        assert part in message


def test_flags_are_never_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown option --nam" in refused(capsys, "--nam", "a")


def test_a_long_value_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refused(capsys, "--n-things", "9" * 100_000)) < 500


def test_flags_of_a_subcommand_are_suggested_too(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser(prog="tool")
    add_flags(parser.add_subparsers().add_parser("go"), Sample, title="options")
    with pytest.raises(SystemExit):
        parser.parse_args(["go", "--shar", "1"])
    assert "tool go: error: unknown option --shar; did you mean --share?" in capsys.readouterr().err


def test_help_shows_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "How many, 100 % of them. (default: 3)" in text and "(default: on)" in text and "{zeta,alpha}" in text


def test_help_shows_short_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", options=EngineConfig)
    text = " ".join(capsys.readouterr().out.split())
    for short in ("-tp", "-pp", "-dp", "-pcp"):
        assert f"(also {short}; default: 1)" in text
    assert "0: 1 with ring, and with auto as many as have heads of their own. (default: 0)" in text


def test_verify_runs_on_what_was_read() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        parse("--kv-cache-memory-bytes", "0", options=EngineConfig)


@pytest.mark.parametrize("option", ["kv_cache_memory_bytes", "structured_outputs_compile_memory"])
@pytest.mark.parametrize("size", ["1XB", "-5", "9" * 400])
def test_what_is_no_size_is_told_of_its_option(option: str, size: str) -> None:
    """Also digits of which no float holds the number."""
    with pytest.raises(
        ConfigError, match=f"^{option} = '{size[:9]}.* is not a size: write bytes, or a number"
    ) as error:
        parse(f"--{option.replace('_', '-')}={size}", options=EngineConfig)
    assert error.value.param == option


def test_overrides_win() -> None:
    parser = FlagParser()
    add_flags(parser, Sample, title="options")
    assert read_flags(parser.parse_args(["--share", "0.1"]), Sample, share=0.9).share == 0.9


def test_skipped_fields_have_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser(prog="tool")
    add_flags(parser, Sample, title="options", skip=("share",))
    with pytest.raises(SystemExit):
        parser.parse_args(["--share", "1"])
    assert "unknown option --share" in capsys.readouterr().err


def test_a_type_that_no_flag_can_carry_is_refused() -> None:
    class Odd(msgspec.Struct):
        table: tuple[int, ...] = ()

    with pytest.raises(TypeError, match=r"Odd\.table"):
        add_flags(argparse.ArgumentParser(), Odd, title="options")


def test_every_engine_option_has_a_flag_with_a_meaning() -> None:
    options = describe(EngineConfig)
    assert [option.name for option in options] == list(EngineConfig.__struct_fields__)
    assert all(option.meaning for option in options)
    assert next(option.flag for option in options if option.name == "max_num_seqs") == "--max-num-seqs"


def test_list_has_an_item_for_each_field() -> None:
    lines = options_list(Sample).splitlines()
    items = [line for line in lines if line.startswith("- ")]
    assert len(items) == len(Sample.__struct_fields__)
    assert items[0] == "- `--n-things` (an integer between 1 and 9; default 3): How many, 100 % of them."
    assert items[-1].startswith("- `--enable-it`, `--no-enable-it` (on or off; default on): ")


def test_long_items_are_wrapped() -> None:
    lines = options_list(EngineConfig).splitlines()
    assert max(len(line) for line in lines) <= 120
    assert any(line.startswith("  ") for line in lines)


@pytest.mark.parametrize("message, param, said", [
    ("pipeline_parallel_size = 9: llama has 8 layers", None, "--pipeline-parallel-size 9: llama has 8 layers"),
    ("nnodes = 2 and pipeline_parallel_size = 3: give --pipeline-parallel-size 2", "nnodes",
     "--nnodes 2 and --pipeline-parallel-size 3: give --pipeline-parallel-size 2"),
    ("nnodes = 2 and enable_lora = True: adapters", None, "--nnodes 2 and --enable-lora: adapters"),
    ("kv_cache_dtype = 'int8' but dtype is float32", None, "--kv-cache-dtype 'int8' but dtype is float32"),
    ("enable_eplb = False: so", None, "--no-enable-eplb: so"),
    ("node_rank = 1: leave node_rank out", None, "--node-rank 1: leave --node-rank out"),
    ("8 ranks need 8 GPUs: lower tensor_parallel_size, or", "tensor_parallel_size",
     "8 ranks need 8 GPUs: lower --tensor-parallel-size, or"),
    ('speculative_config = {"max_num_seqs": 1}: no', None, '--speculative-config {"max_num_seqs": 1}: no'),
    ("config.json: dtype = 'float64' is none", "dtype", "config.json: dtype = 'float64' is none"),
    ("hidden_size = 7: max_model_len = 3", None, "hidden_size = 7: max_model_len = 3"),
    ("model.nnodes = 2 is /models/max_model_len", "nnodes", "model.nnodes = 2 is /models/max_model_len"),
])  # fmt: skip
def test_an_error_names_the_flags_that_were_typed(message: str, param: str | None, said: str) -> None:
    found = in_flags(ConfigError(message, param=param), EngineConfig)
    assert isinstance(found, ConfigError) and (found.message, found.param) == (said, param)


def test_an_error_of_a_request_stays_as_it_is() -> None:
    error = EngineError("max_num_seqs = 4 is no option of a request")
    assert in_flags(error, EngineConfig) is error
