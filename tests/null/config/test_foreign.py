"""Options of vLLM and flags of llama.cpp: each has an answer, and command lines that mean the same are taken."""

from __future__ import annotations

import argparse
import json
import pathlib

import pytest

from quire.cli.model import add_engine_flags, engine_config
from quire.config.engine import EngineConfig
from quire.config.fields import read_yaml
from quire.config.flags import FlagParser, add_flags, read_flags
from quire.config.foreign import FOREIGN, LLAMA_HINTS, OptionShape, State
from quire.config.options import keyword_options
from quire.config.vllm_flags import SHORT
from quire.core.errors import ConfigError
from quire.core.spelling import did_you_mean
from quire.serve.config import ServerConfig

NAMES = json.loads((pathlib.Path(__file__).parents[3] / "benchmarks" / "vllm_names.json").read_text())
OURS = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__, "config"}


def parsed(*words: str) -> argparse.Namespace:
    parser = FlagParser(prog="quire serve")
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, title="server options")
    return parser.parse_args(list(words))


def taken(*words: str) -> EngineConfig:
    return engine_config(parsed(*words))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("quire serve: error: ") and len(error.splitlines()) == 2
    return error


def test_every_option_of_vllm_has_an_answer() -> None:
    flags = {flag[2:].replace("-", "_") for flag in NAMES["serve"]}
    arguments = {*NAMES["engine_args"], *NAMES["async_engine_args"], *NAMES["llm"]["__init__"]}
    assert sorted((flags | arguments) - OURS - set(FOREIGN)) == []


def test_every_short_flag_of_vllm_has_an_answer() -> None:
    expected = {short: flag[2:].replace("-", "_") for flag, shorts in NAMES["serve"].items() for short in shorts}
    assert {short: SHORT.get(short) for short in expected} == expected


def test_what_is_renamed_has_our_name() -> None:
    for option in FOREIGN.values():
        if option.state is State.RENAMED:
            assert option.because in OURS


@pytest.mark.parametrize("name", sorted(set(FOREIGN) - OURS))
def test_each_option_is_taken_or_says_what_to_do(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """On the command line, in each of its values, and no word of the option is left to be the model."""
    option, flag = FOREIGN[name], "--" + name.replace("_", "-")
    if option.state is State.REFUSED:
        words = [flag] if option.shape is OptionShape.SWITCH else [flag, "17"]
        assert f"{flag} is known in vLLM, not in Quire: {option.instead}" in refused(capsys, *words)
        if option.shape is OptionShape.SWITCH:
            assert taken("--no-" + flag[2:]) == EngineConfig()
    elif option.state is State.SAME and option.shape is OptionShape.SWITCH:
        for value, spelling in (("true", flag), ("false", "--no-" + flag[2:])):
            if value in option.values:
                assert taken(spelling, "MODEL").model == "MODEL"
            else:
                assert option.instead in refused(capsys, spelling)
    elif option.state is State.SAME:
        for value in option.values:
            assert taken(flag, value, "MODEL").model == taken(f"{flag}={value}", "MODEL").model == "MODEL"
        message = refused(capsys, flag, "surprising")
        assert "'surprising' is known in vLLM, not in Quire" in message and option.instead in message
    elif option.state is State.NO_EFFECT:
        values = {OptionShape.SWITCH: [], OptionShape.VALUE: ["1"], OptionShape.LIST: ["1", "2"]}[option.shape]
        assert taken("MODEL", flag, *values, "--seed", "3") == EngineConfig(model="MODEL", seed=3)


@pytest.mark.parametrize("words, expected", [
    (["m", "-tp", "1", "--dtype", "half"], {"dtype": "float16"}),
    (["m", "--max_model_len", "32k"], {"max_model_len": 32_000}),
    (["m", "--max_model_len=32K"], {"max_model_len": 32_768}),
    (["m", "--max-num-scheduled-tokens", "64"], {"max_num_batched_tokens": 64}),
    (["m", "--no_enable_prefix_caching"], {"enable_prefix_caching": False}),
    (["-q", "int8", "m"], {"quantization": "int8"}),
])  # fmt: skip
def test_spellings_of_vllm(words: list[str], expected: dict[str, object]) -> None:
    assert taken(*words) == EngineConfig(model="m", **expected)


def test_api_servers_are_api_processes() -> None:
    for words in (["--api-server-count", "2"], ["-asc", "2"], ["--api_server_count=2"]):
        assert read_flags(parsed(*words), ServerConfig).api_processes == 2


def test_a_bad_value_names_the_flag_that_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--api-server-count", "--api_server_count", "-asc"):
        assert f"argument {flag} (--api-processes): '0' is not allowed" in refused(capsys, flag, "0")
        assert f"argument {flag} (--api-processes): '0' is not allowed" in refused(capsys, f"{flag}=0")
    assert "argument --api-processes: '0' is not" in refused(capsys, "--api-processes", "0")
    assert "argument --api-processes: '0' is not" in refused(capsys, "--api_processes", "0")


@pytest.mark.parametrize("words, expected", [
    ((), {}),
    (("--allowed-origins", '["*"]'), {"allowed_origins": ["*"]}),
    (("--allowed-origins", "*"), {"allowed_origins": ["*"]}),
    (("--allowed-origins", '["https://a", "https://b"]'), {"allowed_origins": ["https://a", "https://b"]}),
    (("--allowed-origins", "https://a", '["https://b"]'), {"allowed_origins": ["https://a", "https://b"]}),
    (("--allowed-origins=[]",), {"allowed_origins": []}),
    (("--allowed-methods", '["*"]', "--allowed-headers", '["*"]'), {}),
    (("--allowed-methods", '["GET"]', "--allowed-headers=X-A", "--no-allow-credentials"),
     {"allowed_methods": ["GET"], "allowed_headers": ["X-A"]}),
    (("--allow-credentials",), {"allow_credentials": True}),
])  # fmt: skip
def test_cors_as_vllm_writes_it(words: tuple[str, ...], expected: dict[str, object]) -> None:
    assert read_flags(parsed(*words), ServerConfig) == ServerConfig(**expected)


def test_a_list_in_json_is_of_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "[1] is not allowed" in refused(capsys, "--allowed-origins", "[[1]]")
    with pytest.raises(ConfigError, match=r"allowed_origins: '\[\*\]' must be"):
        read_flags(parsed("--allowed-origins", "[*]"), ServerConfig)


@pytest.mark.parametrize("flag", sorted(LLAMA_HINTS))
def test_flags_of_llama_cpp_get_a_hint(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    message = refused(capsys, flag, "99")
    assert "llama.cpp" in message and LLAMA_HINTS[flag] in message


def test_a_word_far_from_all_has_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refused(capsys, "--tensor-parallel-frobnication", "2")
    assert "did you mean --max-num-seqs?" in refused(capsys, "--max-num-seq", "2")
    assert did_you_mean("abc", ["xyz"]) == "" and did_you_mean("", ["a"]) == ""


@pytest.mark.parametrize("flag, nothing", [
    ("--speculative-config", "null"), ("--kv-transfer-config", "{}"), ("--rope-scaling", "{}"), ("-sc", "null"),
    ("--limit-mm-per-prompt", "{}"), ("--limit_mm_per_prompt", '{"image": 0, "video": 0}'), ("--hf-token", "none"),
    ("--lora-modules", "[]"), ("--compilation-config", '{"pass_config": {}}'), ("--reasoning-config", "null"),
])  # fmt: skip
def test_a_value_that_asks_for_nothing_is_no_model(flag: str, nothing: str) -> None:
    for words in ([flag, nothing], [f"{flag}={nothing}"]):
        assert taken(*words) == EngineConfig()
        assert taken("MODEL", *words, "--seed", "3") == taken(*words, "--seed", "3", "MODEL")


@pytest.mark.parametrize("words", [
    ["-O3"], ["-O2"], ["-O", "3"], ["-O=3"], ["--limit-mm-per-prompt.image", "0"], ["--limit_mm_per_prompt.image=0"],
    ["--kv-transfer-config.kv_role", "null"], ["--ir-op-priority.rms_norm", "native"], ["-cc.custom_ops=[]"],
])  # fmt: skip
def test_parts_and_levels_that_ask_for_nothing_are_taken(words: list[str]) -> None:
    assert taken(*words, "MODEL") == taken("MODEL", *words) == EngineConfig(model="MODEL")


@pytest.mark.parametrize("words, message", [
    (["-O.mode=3"], "-O.mode is known in vLLM, not in Quire: kernels are Quire's own"),
    (["-cc.level", "3"], "-cc.level is known in vLLM, not in Quire: kernels are Quire's own"),
    (["--compilation_config.level", "3"], "--compilation_config.level is known in vLLM, not in Quire: kernels"),
    (["--kv-transfer-config.kv_role", "x"], "--kv-transfer-config.kv_role is known in vLLM, not in Quire: prompts and"),
    (["--kv-transfer-config", "--port"], "--kv-transfer-config is known in vLLM, not in Quire: prompts and decodes"),
    (["--limit-mm-per-prompt.image", "2"], "--limit-mm-per-prompt.image = '2' is known in vLLM, not in Quire, where"),
    (["--limit-mm-per-prompt", '{"image": 2}'], "--limit-mm-per-prompt = 2 is known in vLLM, not in Quire, where"),
    (["--data-parallel-rank.x", "1"], "unknown option --data-parallel-rank.x"),
    (["-Ox"], "unknown option -Ox"),
    (["--tensor-paralel-size", "1"], "size; did you mean --tensor-parallel-size?"),
    (["--max-num-seq", "1"], "; did you mean --max-num-seqs?"),
    (["--max-num-sequences", "1"], "; did you mean --max-num-seqs?"),
    (["--maximum-model-length", "1"], "; did you mean --max-model-len?"),
])  # fmt: skip
def test_parts_levels_and_misspelt_flags_of_vllm(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refused(capsys, *words)


def test_drafts_by_parts() -> None:
    words = ["--speculative-config.method", "ngram", "-sc.num_speculative_tokens=3"]
    expected = {"method": "ngram", "num_speculative_tokens": 3}
    assert taken(*words) == EngineConfig(speculative_config=expected)


def test_json_by_parts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hf-overrides.rope_theta", "1e6", "--hf_overrides.rope_scaling.rope_type=linear"]
    assert taken(*words).hf_overrides == {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear"}}
    assert "has a value of its own" in refused(capsys, "--hf-overrides.a", "1", "--hf-overrides.a.b", "2")
    assert "a JSON object" in refused(capsys, "--hf-overrides", "[1]")


CONFIG = """
# of a deployment
model: org/name
max-model-len: 8k
served_model_name: [a, b]
enable-prefix-caching: false
hf-overrides: {rope_theta: 1000000.0}
tensor-parallel-size: 1
port: 8001
seed:
swap_space:
"""


def test_a_file_of_options(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(CONFIG)
    found = parsed("--config", str(path), "--max_model_len", "4k")
    expected = EngineConfig(
        model="org/name", max_model_len=4000, served_model_name=["a", "b"], enable_prefix_caching=False,
        hf_overrides={"rope_theta": 1e6},
    )  # fmt: skip
    assert engine_config(found) == expected
    assert read_flags(found, ServerConfig).port == 8001
    assert engine_config(parsed("other", f"--config={path}", "--enable-prefix-caching")).model == "other"
    assert engine_config(parsed(f"--config={path}", "--enable-prefix-caching")).enable_prefix_caching


def test_what_is_merged_into_a_mapping_is_not_given_twice(tmp_path: pathlib.Path) -> None:
    """Also where YAML merges on before it has made a value of that mapping."""
    path = tmp_path / "options.yaml"
    path.write_text(
        "rope-scaling: {inner: &own {factor: 2.0, <<: {factor: 4.0, rope_type: linear}}}\n"
        "hf-overrides: {<<: *own, rope_type: dynamic}\n"
    )
    own = {"factor": 2.0, "rope_type": "linear"}
    expected = {"rope-scaling": {"inner": own}, "hf-overrides": own | {"rope_type": "dynamic"}}
    assert read_yaml(path) == (expected, {"rope-scaling": 1, "hf-overrides": 2})


@pytest.mark.parametrize("text, message", [
    ("- 1", "a mapping of options"),
    ("a: [", "is not valid YAML"),
    ("a: [\n", "options.yaml is not valid YAML, line 2, column 1: expected the node content, but found"),
    ("a: 'b", "is not valid YAML, line 1, column 6: found unexpected end of stream"),
    ("data-parallel-rank: 2", "run one server a device"),
    ("data-parallel-rank: 2", "options.yaml, line 1: --data-parallel-rank = '2' is known in vLLM"),
    ("max-num-seq: 2", "did you mean --max-num-seqs?"),
    ("max-num-seq: 2", "options.yaml, line 1: unknown option --max-num-seq; "),
    ("max-num-seq:", "options.yaml, line 1: unknown option --max-num-seq; did you mean --max-num-seqs?"),
    (":::", "unknown option --::"),
    ("seed: -1", "an integer of at least 0"),
    ("port: 8001\n\nmax-num-seqs: banana\n", "options.yaml, line 3: argument --max-num-seqs: 'banana' is not"),
    ("max_num_seqs: banana", "options.yaml, line 1: argument --max-num-seqs: 'banana' is"),
    ("api-key: k\ntensor_parallel: x", "options.yaml, line 2: "),
    ("# one\nenforce-eager: 5", "options.yaml, line 2: argument --enforce-eager/--no-enforce-eager: "),
    ("when: 2020-01-01", "must be a text"),
    ("!!python/object/apply:os.getcwd []", "is not valid YAML"),
    ("hf_overrides: {since: 2020-01-01}", "is not of JSON: Object of type date"),
    ("hf_overrides: &own {of: *own}", "is not of JSON: Circular reference"),
    ("lora_modules: [{name: 2020-01-01, path: b}]", "is not of JSON: Object of type date"),
    ("seed: 1\nseed: 2", "seed is given twice"),
    ("hf_overrides: {rope_theta: 1, rope_theta: 2}", "rope_theta is given twice"),
    ("max_num_seqs: 1\nmax-num-seqs: 2", "gives --max-num-seqs twice, as max_num_seqs and max-num-seqs: leave one out"),
    ("enforce-eager: true\nno-enforce-eager: true", "gives --enforce-eager twice"),
])  # fmt: skip
def test_a_wrong_file_of_options_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, text: str, message: str
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    assert message in refused(capsys, "--config", str(path))


def test_a_missing_file_of_options_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(capsys, "--config", "nowhere.yaml")
    assert "expected one argument" in refused(capsys, "--config")
    assert "given twice" in refused(capsys, "--config", "a", "--config", "b")


@pytest.mark.parametrize("values, expected", [
    ({"quantization": None, "kv_cache_dtype": None, "max_model_len": None}, {}),
    ({"dtype": "float", "max_model_len": "auto"}, {"dtype": "float32"}),
    ({"max_model_len": -1, "tensor_parallel_size": 1, "trust_remote_code": True, "swap_space": 0}, {}),
    ({"limit_mm_per_prompt": {"image": 0}, "hf_overrides": {}}, {}),
    ({"enable_dbo": False, "speculative_config": None, "enable_chunked_prefill": True}, {}),
    ({"served_model_name": "one"}, {"served_model_name": ["one"]}),
    ({"chat_template": pathlib.Path("a.jinja")}, {"chat_template": "a.jinja"}),
    ({"kv_cache_memory_bytes": 1 << 30}, {"kv_cache_memory_bytes": str(1 << 30)}),
])  # fmt: skip
def test_keyword_arguments(values: dict[str, object], expected: dict[str, object]) -> None:
    assert keyword_options(EngineConfig, values, "LLM") == EngineConfig(**expected)


@pytest.mark.parametrize("values, message", [
    ({"tensor_paralel_size": 1}, r"LLM has no option .*; did you mean tensor_parallel_size\?"),
    ({"limit_mm_per_prompt": {"image": 1}}, "limit_mm_per_prompt = 1 is known in vLLM.*text alone"),
    ({"max_num_seq": 3}, r"LLM has no option 'max_num_seq'; did you mean max_num_seqs\?"),
    ({"max_num_sequences": 3}, r"'max_num_sequences'; did you mean max_num_seqs\?"),
    ({"data_parallel_rank": 2}, "data_parallel_rank = 2 is known in vLLM, not in Quire.*one server a device"),
    ({"fully_sharded_loras": True}, "fully_sharded_loras is known in vLLM, not in Quire: adapters.*as their folders"),
    ({"load_format": "pt"}, "load_format = 'pt' is known in vLLM, not in Quire: .*safetensors"),
    ({"quantization": "awq"}, "quantization = 'awq' is known in vLLM, not in Quire"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype = 'fp8_e5m2' is known in vLLM, not in Quire"),
    ({"dtype": "flaot16"}, r"one of auto, bfloat16.*did you mean float16\?"),
    ({"max_num_seqs": 1.5}, "max_num_seqs = 1.5 is not allowed: it must be an integer between 0 and 65536"),
    ({"enforce_eager": "yes please"}, "enforce_eager = 'yes please' is not allowed: it must be on or off"),
])  # fmt: skip
def test_wrong_keyword_arguments(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keyword_options(EngineConfig, values, "LLM")
