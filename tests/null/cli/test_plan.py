"""`quire plan` as a user types it: figures, refusals, JSON, a picture; and what it does not import."""

from __future__ import annotations

import json
import math
import pathlib
import re
import shlex
from typing import Any

import msgspec
import pytest

from benchmarks import plan_speed
from quire.bench.datasets import read_lengths
from quire.bench.shape import FOLDER
from quire.cli.command import make_parser, run
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.engine.simulated import SimulatedMachine
from quire.planner.accelerators import accelerator_named
from quire.planner.calibration import FOLDER as CALIBRATIONS
from quire.planner.error_bar import EXPERTS, WINDOWS
from quire.planner.workload import MOST_TOKENS

ROOT = pathlib.Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 0
    return capsys.readouterr().out


def bar(*kinds: str) -> str:
    """The error bar of recorded runs of such a kind, as it is printed."""
    records = json.loads((CALIBRATIONS / "h200.json").read_text())["records"]
    return f"± {100 * next(one['error'] for one in records if one['kinds'] == sorted(kinds)):.0f} %"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["plan", *words]) == 2
    return capsys.readouterr().err


def test_a_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "shape:llama-3.1-8b")
    assert "8,030,261,248 parameters" in text and "128.00 KiB a token" in text and "H200" not in text


def test_a_plan_for_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "shape:llama-3.1-70b", "--gpu", "h100", "--count", "4", "--price", "2.5")
    assert "4 x H100" in text and "$/M tokens" in text and "tp4" in text
    assert "quire serve shape:llama-3.1-70b --tensor-parallel-size 4" in text
    assert "no step was ever timed on the H100" in text
    assert run(["plan", "shape:llama-3.1-70b", "--gpu", "h100", "--count", "16", "--mesh", "tp=16"]) == 1
    assert "not in this engine" in capsys.readouterr().out


def test_a_model_that_does_not_fit_names_the_least_that_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "shape:llama-3.1-70b", "--gpu", "h100"]) == 1
    text, said = capsys.readouterr()
    assert "does not fit: short by" in text and "the least that would: 2 devices" in text
    assert "quire serve" not in text
    assert said.startswith("quire plan: shape:llama-3.1-70b does not fit on 1 x H100: short by ")
    assert said.endswith("--count 2 (pp2) is the least\n")


@pytest.mark.parametrize(("words", "message"), [
    (["shape:llama-3.1-8b", "--gpu", "h200", "--count", "3", "--mesh", "tp=3"], "8b cannot be divided among 3 x H200"),
    (["shape:deepseek-v3", "--gpu", "h200", "--json"], "--count 16 (pp16) is the least"),
    (["shape:qwen3-next-80b-a3b", "--gpu", "h100"], "--count 4 (pp4) is the least"),
    (["shape:llama-3.1-8b", "--gpu", "rtx-4090", "--kv-cache-dtype", "bfloat16", "--workload", "LONG"],
     "fit on 1 x RTX-4090: not one sequence of 100,000 tokens has room; --count 2 (pp2) is the least"),
    (["train", "shape:llama-3.1-70b", "--gpu", "h100", "--gpus", "2", "--tokens", "1B"], "does not fit on 2 x H100 so"),
])  # fmt: skip
def test_what_does_not_fit_ends_with_1_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, words: list[str], message: str
) -> None:
    (tmp_path / "l.json").write_text('{"input": [99900], "output": [100]}')
    words = [str(tmp_path / "l.json") if word == "LONG" else word for word in words]
    assert run(["plan", *words]) == 1
    said = capsys.readouterr()
    assert message in said.err
    if "--json" in words:
        assert not json.loads(said.out)["memory"]["fits"]


@pytest.mark.parametrize(("flag", "message"), [
    ("--quantization", "here it is --weights, such as fp8"), ("-tp", "here it is --mesh tp=N with --count N"),
    ("--max-num-sequences", "did you mean --max-num-seqs?"), ("--shape", "here it is shape:NAME, the first word"),
])  # fmt: skip
def test_flags_of_other_commands_are_named_as_they_are_here(
    capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["plan", "demo", flag, "2"])
    assert ended.value.code == 2 and f"unknown option {flag}" in (said := capsys.readouterr().err) and message in said


@pytest.mark.parametrize("model", ["qwen3-32b", "mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_command_makes_an_engine_of_that_mesh(capsys: pytest.CaptureFixture[str], model: str, n: int) -> None:
    meshes: list[list[str]] = [
        [],
        ["--mesh", f"tp={n}"],
        ["--mesh", f"pp={n}"],
        ["--mesh", f"tp={n},ep={n}"] if "32b" not in model else [],
        ["--mesh", f"sp={n}"],
        ["--mesh", f"ring={n}"],
        ["--mesh", f"sp=2,ring={n // 2}"] if n > 2 else [],
        ["--mesh", f"dp={n},ep={n}"] if "32b" not in model else [],
    ]
    for words in meshes:
        found = json.loads(
            planned(capsys, f"shape:{model}", "--gpu", "h200", "--count", str(n), "--json", "--slo", "none", *words)
        )
        config = made_config(found["command"])
        degrees = dict(re.fullmatch(r"([a-z]+)(\d+)", word).groups() for word in found["meshes"][0]["mesh"].split()
                       if word[-1].isdecimal())  # fmt: skip
        n_data = int(degrees.get("dp", 1))
        of_all = str(int(degrees.get("tp", 1)) * n_data)
        assert degrees.keys() <= {"tp", "pp", "ep", "dp", "sp", "ring"}
        assert degrees.get("ep", "1") in ("1", degrees.get("tp", "1"), of_all)
        assert config.data_parallel_size == (n_data if degrees.get("ep") == of_all else 1)
        assert config.tensor_parallel_size == int(degrees.get("tp", 1))
        assert config.pipeline_parallel_size == int(degrees.get("pp", 1))
        assert config.enable_expert_parallel == ("ep" in degrees)
        assert config.prefill_context_parallel_size == int(degrees.get("sp", 1)) * int(degrees.get("ring", 1))
        assert config.ulysses_degree == (int(degrees["sp"]) if degrees.keys() >= {"sp", "ring"} else 0)
        method = "ring" if "ring" in degrees else "ulysses" if "sp" in degrees else "auto"
        assert config.context_parallel_method == method


def made_config(command: str) -> EngineConfig:
    namespace = make_parser("serve").parse_args(shlex.split(command)[1:])
    known = {name: getattr(namespace, name) for name in EngineConfig.__struct_fields__ if hasattr(namespace, name)}
    config = msgspec.convert(known, EngineConfig)
    config.verify()
    return config


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--mesh", "tp=16,pp=2", "--count", "32"], "all ranks of a stage are in one host, which has 8 devices"),
        (["--mesh", "tp=8,pp=16", "--count", "128"], "tp = 8, pp = 16: an engine has 64 ranks at most"),
        (["--mesh", "tp=2,sp=2", "--count", "4"], "tp2 sp2: ranks that divide tokens"),
        (["--mesh", "tp=16", "--count", "16"], "in one host, which has 8 devices"),
        (["--gpu", "cpu", "--mesh", "tp=2", "--count", "2"], "the whole CPU of a host as one device; ranks that share"),
        (["--gpu", "a100", "--kv-cache-dtype", "fp8"], "keys and values in fp8 need a GPU that converts to e4m3"),
        (["--weights", "int8-g32"], "weights in int8-g32 run on a CPU only"),
        (["--gpu", "mi300x"], "no kernels for the MI300X"),
    ],
)  # fmt: skip
def test_what_this_engine_cannot_do_has_no_command(
    capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    model = "shape:qwen2.5-72b" if "tp=16" in words else "demo" if "cpu" in words else "shape:qwen3-32b"
    assert run(["plan", model, "--gpu", "h200", *words]) == 1
    text, said = capsys.readouterr()
    assert "cannot be served by this version: " in text and reason in text and "quire serve" not in text
    assert said.startswith(f"quire plan: {model} on ") and reason in said and said.count("\n") == 1


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v2-lite", "mamba2-2.7b", "lfm2-1.2b"])
@pytest.mark.parametrize("weights", ["auto", "float32", "fp8"])
def test_the_engine_takes_every_command_or_its_own_reason_is_told(
    capsys: pytest.CaptureFixture[str], model: str, weights: str
) -> None:
    arch, n_commands = read_arch(FOLDER / model), 0
    for kv in ("auto", "bfloat16", "float16", "float32", "fp8", "int8"):
        formats = ("--weights", weights, "--kv-cache-dtype", kv)
        words = ("plan", f"shape:{model}", "--gpu", "b200", *formats, "--slo", "none", "--max-num-seqs", "8", "--json")
        code = run(list(words))
        found = json.loads(capsys.readouterr().out)
        assert code == ("command" not in found)
        n_commands += "command" in found
        config = EngineConfig(kv_cache_dtype=kv, dtype="auto" if weights == "fp8" else weights)  # type: ignore[arg-type]
        if "command" in found:
            served = resolve(made_config(found["command"]), arch, "cuda")
            assert served.kv_dtype == resolve(config, arch, "cuda").kv_dtype
        else:
            with pytest.raises(ConfigError) as refusal:
                resolve(config, arch, "cuda")
            assert found["cannot"] == refusal.value.message
    assert n_commands >= 2


def test_weights_of_another_type_are_planned_with_keys_and_values_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "256.00 KiB a token" in planned(capsys, "shape:llama-3.1-8b", "--weights", "float32")


def test_an_objective_chooses_the_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    def best(slo: str) -> dict[str, float]:
        words = ("shape:llama-3.1-8b", "--gpu", "h200", "--slo", slo, "--json")
        run(["plan", *words])
        return dict(json.loads(capsys.readouterr().out)["meshes"][0])

    loose, tight = best("tpot=30ms"), best("tpot=6ms")
    assert tight["tpot_ms"] <= 6 < loose["tpot_ms"] <= 30
    assert tight["concurrency"] < loose["concurrency"] and tight["tokens_per_s"] < loose["tokens_per_s"]
    assert best("tpot=1ms")["meets_slo"] is False


def test_operators_that_send_take_time(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(
        planned(capsys, "shape:llama-3.1-8b", "--gpu", "h200", "--count", "2", "--mesh", "tp=2", "--json")
    )
    rows = {row["operator"]: row for row in found["steps"]["decode"]}
    for sent in found["communication"]:
        assert rows[sent["name"]]["limit_us"] == pytest.approx(sent["us"]) and sent["us"] > 0
        assert rows[sent["name"]]["bound"] == "wire"


def test_as_many_recurrent_states_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "shape:mamba2-2.7b", "--gpu", "h100", "--slo", "none")
    assert "what is reserved for 1,024 leaves too little" in text and "quire serve" in text
    assert "tokens of keys and values; at most" not in text
    memory = json.loads(planned(capsys, "shape:mamba2-2.7b", "--gpu", "h100", "--json"))["memory"]
    n = memory["max_num_seqs"]
    assert 1 < n < 1024 and memory["fits"]
    one = json.loads(planned(capsys, "shape:mamba2-2.7b", "--gpu", "h100", "--json", "--max-num-seqs", str(n + 1)))
    assert one["memory"]["max_num_seqs"] == n
    assert sum(memory["terms"].values()) <= memory["budget_bytes"]


def test_an_objective_that_nothing_meets(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "shape:llama-3.1-8b",
        "--gpu",
        "h200",
        "--count",
        "4",
        "--mesh",
        "dp=4",
        "--slo",
        "tpot=2ms",
        "--price",
        "3",
    )
    assert run(["plan", *words]) == 1
    text, said = capsys.readouterr()
    nearest = re.search(r"no concurrency meets tpot=2ms; nearest is a TTFT of .* at 4 sequences \(dp4\)\n", text)
    assert nearest is not None and said == f"quire plan: shape:llama-3.1-8b on 4 x H200: {nearest[0]}"
    assert "quire serve" not in text and "$/M" not in text
    assert run(["plan", *words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "command" not in found and "dollars_per_million" not in found["meshes"][0]
    assert found["meshes"][0]["tpot_ms"] == min(one["tpot_ms"] for one in found["frontier"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h300"], "did you mean h200? There are h100, h100-pcie, h100-nvl, h200"),
        (["--gpu", "h20"], "did you mean h200? There are h100, "),
        (["--gpu", "b100"], "did you mean b200? There are b200, b300, "),
        (["--gpu", "rtx1-3090"], "did you mean rtx-3090? There are rtx-a6000, "),
        (["--gpu", "h200", "--slo", "ttft=soon"], "'ttft=soon' cannot be read: write ttft=200ms"),
        (["--gpu", "h200", "--slo", "foo=200ms"], "'foo' is no time that is known: there are ttft, tpot, as in"),
        (["--gpu", "h200", "--slo", "tpot=0ms"], "nothing takes no time"),
        (["--gpu", "h200", "--slo", "tpot=1ms,tpot=2ms"], "says tpot twice"),
        (["--gpu", "h200", "--price", "-1"], "--price -1"),
        (["--gpu", "h200", "--price", "nan"], "--price nan"),
        (["--gpu", "h200", "--price", "0"], "--price 0 is out of range: dollars an hour of one device are"),
        (["--gpu", "h200", "--price", "1e300"], "are 0.000001 to 1,000,000; leave it out for none"),
        *[(["--gpu", "h200", flag, ""], f"{flag} names nothing: give ")
          for flag in ("--gpu", "--mesh", "--workload", "--slo", "--expert-loads", "--eplb-config", "--calibration",
                       "--plot", "--check")],
        (["--price", "2"], "--price is about devices: say which with --gpu"),
        (["--count", "2"], "--count is about devices"),
        (["--mesh", "tp=2"], "--mesh is about devices"),
        (["--gpu", "h200", "--max-model-len", "99999999"], "--max-model-len 99,999,999 exceeds the 40,960 positions"),
        (["--gpu", "h200", "--max-model-len", "1000"], "of 1,280 tokens, prompt and output, and the longest is 1,000"),
        (["--gpu", "h200", "--count", "0"], "--count 0: 1 to"),
        (["--gpu", "h200", "--slo", ","], "--slo ',' sets no limit"),
        (["--check", "w6.json", "--price", "3"], "--price changes nothing beside --check"),
        (["--check", "w6.json", "--weights", "fp8"], "--weights changes nothing beside --check"),
        (["--dataset-path", "l.json"], "--dataset-path has the lengths of what --check compares"),
        (["--gpu", "tpu"], "`here` measures this machine, `cpu` its CPU"),
        (["--gpu", "h200", "--mesh", "tp=x"], "'tp=x' cannot be read"),
        (["--gpu", "h200", "--mesh", f"tp={'9' * 5000}"], "each from 1 to 1,024"),
        (["--gpu", "h200", "--mesh", "tp=2,tp=4"], "says tp twice"),
        (["--gpu", "h200", "--count", "4", "--mesh", "tp=8"],
         "has 8 devices, and --count is 4: give a mesh of 4, or --count 8; without --mesh every mesh"),
        (["--weights", "mxfp4"], "--weights mxfp4 is of experts alone, and qwen3 has none: give another"),
        (["--weights", "int3"], "did you mean int4"),
        (["--kv-cache-dtype", "int9"], "'int9' is unknown"),
        (["--gpu", "h200", "--workload", "chatt"], "did you mean chat"),
        (["--plot", "a.png"], "give --gpu"),
        (["--gpu", "h200", "--plot", "a.pdf"], "must end with .png"),
        (["--gpu", "h200", "--calibration", "/nowhere.json"], "cannot be read"),
        (["--gpu", "h100", "--calibration", str(CALIBRATIONS / "h200.json")], "and --gpu is h100: give --gpu h200"),
        *[([flag, value], f"{flag} is about devices: say which with --gpu")
          for flag, value in (("--slo", "ttft=1s"), ("--workload", "chat"), ("--calibration", "cal.json"),
                              ("--max-num-seqs", "9"), ("--max-model-len", "99"))],
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert message in refused(capsys, "shape:qwen3-0.6b", *words)


def test_missing_and_impossible_models(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert "did you mean shape:qwen3-0.6b" in refused(capsys, "shape:qwen3-0.6")
    assert "neither a folder" in refused(capsys, "nothing-here")
    assert "did you mean shape:llama-3.1-8b?" in refused(capsys, "llama-3.1-8b")
    assert "config.json" in refused(capsys, str(tmp_path))
    for path in ("./nothing-here", "/nowhere/model", "../nothing/", "~/no/model", "no/model/"):
        assert "there is no such folder" in refused(capsys, path)
    config = json.loads((FOLDER / "qwen3-0.6b" / "config.json").read_text())
    for field, value in (
        ("num_hidden_layers", -1),
        ("hidden_size", 0),
        ("num_key_value_heads", 7),
        ("vocab_size", 2**40),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
        assert field in refused(capsys, str(tmp_path)), field


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": [1], "output": [-2]}', r"request 0 has the lengths"), ('{"input": [1]}', "lists 'input'"),
        ('{"input": [], "output": []}', "no requests"), ("[", "lists 'input'"),
        ('{"input": [1], "output": []}', "lists"), ("[" * 100_000, "lists 'input'"),
    ],
)  # fmt: skip
def test_bad_lengths(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "l.json").write_text(text)
    assert message in refused(capsys, "shape:qwen3-0.6b", "--gpu", "h200", "--workload", str(tmp_path / "l.json"))


def test_lengths_beyond_the_context(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "long.json").write_text('{"input": [200000], "output": [50]}')
    words = ("--gpu", "h200", "--workload", str(tmp_path / "long.json"))
    assert "200,050 tokens, prompt and output, and the longest is 131,072" in refused(
        capsys, "shape:llama-3.1-8b", *words
    )


def test_lengths_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.json").write_text('{"input": [100, 300], "output": [50, 150]}')
    text = planned(capsys, "shape:qwen3-0.6b", "--gpu", "l4", "--workload", str(tmp_path / "mine.json"))
    assert "workload mine" in text
    (tmp_path / "mine.json").write_text(f'{{"input": [{MOST_TOKENS + 1}], "output": [1]}}')
    said = refused(capsys, "shape:qwen3-0.6b", "--gpu", "l4", "--workload", str(tmp_path / "mine.json"))
    assert "request 0 has the lengths (16777216, 1): whole numbers from 1 to 16,777,215 are wanted" in said
    with pytest.raises(ConfigError, match="`int` <= 16777215"):
        read_lengths(str(tmp_path / "mine.json"))


@pytest.mark.parametrize(("words", "within", "said"), [
    (("gemma-3-1b",), bar(WINDOWS), "two kinds of windows: expec"), (("gpt-oss-20b",), bar(WINDOWS, EXPERTS), ""),
    (("llama-3.1-8b",), bar(), ""), (("qwen3-30b-a3b",), bar(EXPERTS), "  - experts: expectations are worse"),
    (("deepseek-v2-lite",), bar(EXPERTS, "latent attention"), "  - experts: chosen evenly"),
])  # fmt: skip
def test_error_bars_are_by_kind_and_what_is_worse_is_said(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], within: str, said: str
) -> None:
    name, *rest = words
    text = planned(capsys, f"shape:{name}", "--gpu", "h200", *rest)
    assert within in text and said in text and ("worse than of other models" in text) == ("expec" in said)


def test_times_of_a_cpu_are_none_of_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    found = json.loads((CALIBRATIONS / "h200.json").read_text()) | {"device": "cpu"}
    (tmp_path / "cpu.json").write_text(json.dumps(found))
    said = refused(capsys, "demo", "--gpu", "h200", "--calibration", str(tmp_path / "cpu.json"))
    assert "measured on a CPU, and --gpu is h200: give --gpu here, or leave --calibration out" in said


def test_times_of_a_gpu_are_none_of_this_machines_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "demo", "--gpu", "cpu", "--calibration", str(CALIBRATIONS / "h200.json"))
    assert "measured on the h200, and --gpu is cpu: leave one of them out" in said


def test_the_margin_of_a_tiny_model_is_wide_and_figures_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "demo", "--gpu", "h200")
    assert "so small a model" in text and bar() not in text
    assert planned(capsys, "demo").splitlines()[-1].endswith("add --gpu NAME, such as --gpu h200, or --gpu here")


@pytest.mark.parametrize(("words", "told", "is_command"), [
    (("shape:gpt-oss-20b", "--weights", "mxfp4"), "the checkpoint of shape:gpt-oss-20b has to have them", True),
    (("shape:qwen3-8b", "--weights", "fp8-block128"), "the checkpoint of shape:qwen3-8b has to have them", True),
    (("shape:qwen3-8b", "--weights", "int4-g128"), "--quantization int4-g128", True),
    (("shape:qwen3-8b", "--weights", "fp8"), "--quantization fp8", True),
])  # fmt: skip
def test_formats_of_checkpoints_need_no_flag(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str, is_command: bool
) -> None:
    text = planned(capsys, *words, "--gpu", "h200")
    assert told in " ".join(text.split()) and (f"quire serve {words[0]}" in text) is is_command
    assert ("--quantization" in text) is ("--quantization" in told)


@pytest.mark.parametrize(("gpu", "mesh", "was_measured", "has_sums"), [
    ("h200", "tp=2", True, True), ("h200", "tp=4", True, True), ("h200", "pp=2", False, True),
    ("h100", "tp=2", False, True), ("a100", "tp=2", False, False),
])  # fmt: skip
def test_what_was_measured_of_several_devices_is_said(
    capsys: pytest.CaptureFixture[str], gpu: str, mesh: str, was_measured: bool, has_sums: bool
) -> None:
    text = planned(capsys, "shape:qwen3-8b", "--gpu", gpu, "--count", mesh[-1], "--mesh", mesh)
    assert ("of -tp 2 the 8B was measured, of -tp 4 the 8B and the 70B" in text) is was_measured
    assert ("it was not measured" in text) is not was_measured
    assert ("sums as timed on four H200s" in text) is has_sums


def test_only_experts_are_in_mxfp4(capsys: pytest.CaptureFixture[str]) -> None:
    """As gpt-oss-20b's checkpoint has it: 12.8 GiB (https://huggingface.co/openai/gpt-oss-20b, arXiv 2508.10925)."""
    kept = json.loads(planned(capsys, "shape:gpt-oss-20b", "--weights", "mxfp4", "--json"))["facts"]["weights_bytes"]
    assert kept == pytest.approx(12.8 * 2**30, rel=0.005)


def test_experts_that_move_are_planned_with_their_copies(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "shape:qwen3-30b-a3b",
        "--gpu",
        "h200",
        "--count",
        "4",
        "--mesh",
        "tp=4,ep=4",
        "--expert-loads",
        "zipf:1.0",
    )
    moved = ("--enable-eplb", "--eplb-config", '{"num_redundant_experts": 16}')
    stay, move = (json.loads(planned(capsys, *words, *more, "--json")) for more in ((), moved))
    assert move["memory"]["terms"]["weights"] > stay["memory"]["terms"]["weights"]
    assert stay["experts"]["imbalance"] > 1.4 > 1.02 > move["experts"]["imbalance"] and move["experts"]["copies"] == 16
    text = planned(capsys, *words, *moved)
    assert "of 4 ranks with 16 copies in a layer the busiest has 1.00 times the rows of the mean" in text
    assert """--enable-expert-parallel --enable-eplb --eplb-config '{"num_redundant_experts": 16}'""" in text
    assert "skewed routing" not in text and "skewed routing" in planned(capsys, *words[:-2])


@pytest.mark.parametrize(("words", "message"), [
    (("shape:qwen3-30b-a3b", "--count", "4", "--eplb-config", '{"num_redundant_experts": 4}'), "add --enable-eplb"),
    (("shape:qwen3-30b-a3b", "--count", "4", "--eplb-config", "{}"), "add --enable-eplb, or leave it out"),
    (("shape:qwen3-30b-a3b", "--count", "4", "--enable-eplb", "--eplb-config", "[4]"), "is no JSON object"),
    (("shape:qwen3-30b-a3b", "--count", "4", "--enable-eplb", "--eplb-config", '{"num_redundant_experts": 4'),
     """--eplb-config '{"num_redundant_experts": 4' is no JSON object"""),
    (("shape:qwen3-30b-a3b", "--count", "4", "--enable-eplb", "--eplb-config", "x"), "--eplb-config 'x' is no JSON"),
    (("shape:qwen3-30b-a3b", "--count", "4", "--enable-eplb", "--eplb-config", '{"copies": 4}'), "copies is unknown"),
    (("shape:qwen3-30b-a3b", "--enable-eplb"), "one device has all of them"),
    (("shape:llama-3.1-8b", "--count", "4", "--enable-eplb"), "llama has no experts: leave --enable-eplb out"),
    (("shape:llama-3.1-8b", "--expert-loads", "zipf:1"), "llama has no experts: leave --expert-loads out"),
])  # fmt: skip
def test_experts_that_cannot_move(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert message in refused(capsys, *words, "--gpu", "h200")


def test_a_calibration_can_be_given(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    slow = json.loads((CALIBRATIONS / "h200.json").read_text()) | {"read_bytes_per_s": 1e12, "error": 0.33}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    words = ("shape:llama-3.1-8b", "--gpu", "h200", "--slo", "none", "--json")
    fast = json.loads(planned(capsys, *words))["frontier"][0]["tpot_ms"]
    found = json.loads(planned(capsys, *words, "--calibration", str(tmp_path / "slow.json")))
    assert found["frontier"][0]["tpot_ms"] > 3 * fast and found["meshes"][0]["error"] == pytest.approx(0.33)


@pytest.mark.parametrize(("field", "value", "message"), [
    ("products", {}, "products or experts has no bfloat16"), ("experts", {}, "has no bfloat16"),
    ("flops_per_s", {}, "flops_per_s is empty"),
    ("captured", -5, "$.captured"), ("read_bytes_per_s", -1.0, "$.read_bytes_per_s"),
])  # fmt: skip
def test_a_calibration_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, field: str, value: object, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(json.loads((CALIBRATIONS / "h200.json").read_text()) | {field: value}))
    assert message in refused(capsys, "shape:qwen3-0.6b", "--gpu", "h200", "--calibration", str(path))


def test_a_picture(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    planned(capsys, "shape:olmoe-1b-7b", "--gpu", "a10", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_neither_torch_nor_numpy_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest model over all meshes of 64 devices, in a process of its own. Its time: benchmarks/plan_speed.py."""
    monkeypatch.chdir(ROOT)
    found = plan_speed.planned()
    assert (found["code"], found["loaded"]) == (0, [])
    assert (found["n_meshes"], found["n_refused"]) == (139, 1)
    assert found["kib"] < 100 * 1024


def test_sizes_beside_weights_of_terabytes_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "shape:deepseek-v3", "--gpu", "h200"]) == 1
    assert "weights 1,250.08 GiB, workspace 3.38 GiB" in capsys.readouterr().out


def test_recurrent_layers_may_be_in_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Three engines of one GPU each have no room for it, three stages have."""
    text = planned(capsys, "shape:qwen3-next-80b-a3b", "--gpu", "h200", "--count", "3", "--slo", "none")
    assert "memory of a device (pp3)" in text and "it fits: " in text
    assert "\n  quire serve shape:qwen3-next-80b-a3b --pipeline-parallel-size 3" in text


def test_the_bundled_model_has_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--gpu", "h200", "--slo", "none")
    assert text.startswith("demo: llama, 8 layers") and "\n  quire serve demo --max-num-seqs" in text


@pytest.mark.parametrize(("gpu", "mesh", "n_nodes"), [
    ("h200", "tp=8,pp=2", 2), ("h200", "tp=4,pp=4", 2), ("h200", "pp=16", 2), ("a100", "tp=4,pp=3", 3),
    ("gh200", "pp=4", 4), ("h200", "tp=4,pp=2", 1),
])  # fmt: skip
def test_stages_lie_on_several_machines(capsys: pytest.CaptureFixture[str], gpu: str, mesh: str, n_nodes: int) -> None:
    """As `quire serve --nnodes` has them: 405B takes two of eight GPUs."""
    count = str(math.prod(int(one.partition("=")[2]) for one in mesh.split(",")))
    words = ("shape:qwen2.5-72b", "--gpu", gpu, "--count", count, "--mesh", mesh, "--slo", "none")
    text = planned(capsys, *words)
    (command,) = re.findall(r"^  (quire serve .*)$", text, re.M)
    assert made_config(command).nnodes == n_nodes
    assert (f"nnodes = {n_nodes}: start it on each machine, with its own --node-rank" in text) is (n_nodes > 1)


def test_experts_of_many_hosts_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "shape:qwen3-30b-a3b", "--gpu", "h200", "--count", "16", "--mesh", "tp=2,ep=16"]) == 1
    assert "and a latency for each; it was not measured" in capsys.readouterr().out


def test_states_leave_a_plan_what_they_leave_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    qwen = ("shape:qwen3-next-80b-a3b", "--gpu", "h200", "--count", "2", "--mesh", "dp=2,ep=2", "--json")

    def memory(*words: str) -> tuple[dict[str, Any], float]:
        found = json.loads(planned(capsys, *qwen, *words))
        return found["memory"], found["meshes"][0]["tokens_per_s"]

    chosen, speed = memory()
    n = chosen["max_num_seqs"]
    assert n < chosen["asked_num_seqs"] == 1024
    assert chosen["longest_context"] == 262144 <= chosen["kv_tokens"], "the model's own length has room beside states"
    more, _ = memory("--max-num-seqs", str(n + 1))
    assert more["max_num_seqs"] == n + 1, "what is asked for stays"
    assert more["longest_context"] < 262144, "one more would not leave it"
    _, of_256 = memory("--max-num-seqs", "256")
    assert speed >= 0.95 * of_256, "nobody has to know the flag"
    config = EngineConfig(data_parallel_size=2, enable_expert_parallel=True, enforce_eager=True)
    memory_bytes = int(accelerator_named("h200").memory_bytes)
    machine = SimulatedMachine.of(
        config, read_arch(FOLDER / "qwen3-next-80b-a3b"), "h200", memory_bytes, is_server=True
    )
    assert n == pytest.approx(machine.limits.max_num_seqs, rel=0.02), "captured steps are not simulated, but planned"
