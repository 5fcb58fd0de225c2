"""`quire simulate` as a user types it: no torch, tables, JSON, pictures, and refusals before anything is simulated."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from quire.bench.shape import FOLDER
from quire.cli.main import main
from quire.planner import error_bar
from quire.planner.accelerators import ASSUMED_ERROR, accelerator_named, calibration_for
from quire.planner.calibration import FOLDER as CALIBRATIONS
from quire.planner.error_bar import TENSOR

MODEL = "shape:qwen3-0.6b"
SMALL = ("--num-prompts", "12", "--input-len", "40", "--output-len", "6", "--max-model-len", "1024")


def test_the_command_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quire.cli.main import main\n"
        f"assert main(['simulate', {MODEL!r}, '--num-prompts', '4', '--request-rate', '5', '--replicas', '2']) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "request_throughput" in done.stdout


def test_help_names_the_model_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "without it shape:llama-3.1-8b is used" in words and "shape:llama-3.1-8b in `quire simulate`" in words
    assert main(["simulate", *SMALL]) == 0
    assert capsys.readouterr().out.startswith("model       shape:llama-3.1-8b")


def test_one_run_goes_to_json_and_a_page(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = str(tmp_path / "r.json"), str(tmp_path / "p.html")
    assert main(["simulate", MODEL, *SMALL, "--slo", "ttft=1s", "--output-json", path, "--plot", page]) == 0
    out = capsys.readouterr().out
    assert "slo_attainment" in out and "processor time" in out
    report = json.loads(pathlib.Path(path).read_text())
    (run,) = report["results"]["runs"]
    told = report["results"]["simulated"]["as given"]
    assert (told["model"], told["device"], told["n_requests"]) == (MODEL, "h200", 12) and told["error"] < 0.25
    assert run["completed"] == 12 and run["slo_attainment"] == 1.0 and report["config"]["n_pages"] > 100
    assert "<svg" in pathlib.Path(page).read_text()


def test_what_was_simulated_is_said_first(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.json"
    several = next(one.error for one in calibration_for(accelerator_named("h200")).records if one.kinds == (TENSOR,))
    bar = ASSUMED_ERROR + several
    words = ["simulate", MODEL, *SMALL, "--gpu", "a100", "--tensor-parallel-size", "2", "--request-rate", "5"]
    assert main([*words, "--compare", "gpu=h200", "replicas=3", "--output-json", str(path)]) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("model       shape:qwen3-0.6b, ")
    assert f"a100-80, 79.30 GiB; times ± {100 * bar:.0f} %" in found[1]
    assert "assumed, never measured: peaks of NVIDIA data sheet A100" in found[2]
    assert found[3].endswith("2 GPUs share each layer")
    assert found[2].endswith("of several GPUs only dense models on H200s were ever measured")
    assert "random, 40 tokens in, 6 out: 12 requests, 5 a second" in found[4] and found[5] == "replicas    1"
    assert "h200, 140.40 GiB" in found[6] and found[6].endswith("(with gpu=h200)") and "measured: " in found[7]
    assert found[8] == "replicas    3, chosen by prefix (with replicas=3)" and not found[9]
    told = json.loads(path.read_text())["results"]["simulated"]
    assert told["as given"]["error"] == pytest.approx(bar) and told["as given"]["n_ranks"] == 2
    assert main(["simulate", MODEL, *SMALL, "--gpu", "cpu"]) == 0
    assert "how far they are off is not known" in capsys.readouterr().out.splitlines()[1]


def test_models_that_are_expected_worse_are_said_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a simulation can have, no kind is worse than usual: so less is."""
    monkeypatch.setattr(error_bar, "MOST_USUAL", 0.05)
    assert main(["simulate", "shape:qwen3-30b-a3b", *SMALL]) == 0
    found = capsys.readouterr().out.splitlines()
    assert "; experts: expectations are worse than of other models" in found[2]


def test_rates_make_a_curve_and_flags_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["simulate", MODEL, *SMALL, "--request-rate", "5", "50", "--compare", "replicas=2,no-enable-prefix-caching"]
        )
        == 0
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("as given", "replicas=2"))]
    assert len(rows) == 4
    assert (
        main(["simulate", MODEL, *SMALL, "--compare", "max-num-seqs=2", "max-num-batched-tokens=64,max_num_seqs=4"])
        == 0
    )
    table = capsys.readouterr().out
    (head,) = [line for line in table.splitlines() if line.lstrip().startswith("as given")]
    assert "max-num-batched-tokens=64,max_num_seqs=4" in head
    (steps,) = [line.split() for line in table.splitlines() if line.startswith("steps")]
    assert int(steps[1]) < int(steps[2]), "two at a time take more steps than all at once"


def test_capacity_and_baselines(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", MODEL, *SMALL, "--num-prompts", "40"]
    assert main([*words, "--capacity", "--slo", "ttft=50ms,tpot=2ms"]) == 0
    assert "capacity" in capsys.readouterr().out
    assert main([*words, "--capacity", "--slo", "ttft=1us"]) == 1, "no rate keeps it"
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "pictures"
    assert main([*words, "--baselines", "--baseline-batch", "8", "--request-rate", "50", "--plot", str(folder)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("static 8", "dynamic 8", "reserved", "paged", "chunked"))
    assert sorted(one.name for one in folder.iterdir()) == ["batches.png", "frontier.png", "kv.png", "stalls.png"]
    curves, spread = str(tmp_path / "c.png"), str(tmp_path / "d.png")
    assert main([*words, "--request-rate", "5", "50", "--plot", curves]) == 0
    assert main([*words, "--compare", "max-num-seqs=2", "--plot", spread]) == 0
    assert pathlib.Path(curves).stat().st_size > 5000 and pathlib.Path(spread).stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "1GiB"], "or divide it over several GPUs with --tensor-parallel-size"),
        (["--input-len", "100000000"], "--input-len: '100000000' is not allowed: it must be an integer between 1 and"),
        (["--prefix-len", "1" + 30 * "0"], "it must be an integer between 0 and 16777215"),
        (["--input-len", "10000000"], "has 10,000,000 tokens of prompt and 128 of output, and the context holds"),
        (["--output-len", "200000"], "and 200,000 of output, and the context holds 40,960: ask for less"),
        (["--gpu", "h2000"], "'h2000' is unknown; did you mean h200?"),
        (["--gpu", "here"], "`cpu` is a CPU, with --calibration one that `quire bench calibrate` has timed"),
        (["--burstiness", "inf", "--request-rate", "4"], "it must be a number between 1e-06 and 1000000.0"),
        (["--compare", "input-len=3"], "the same for all that is compared: give it beside --compare"),
        (["--compare", "slo=ttft=1ms"], "unknown option --slo: here it is the same for all"),
        (["--trace", "a.csv", "--num-prompts", "3"], "--trace says what is asked, and does not read --num-prompts"),
        (["--workload", "sharegpt", "--input-len", "3"], "--workload sharegpt says what is asked, and does not read"),
        (["--prefix-len", "9", "--num-prefixes", "3"], "--dataset-name random says what is asked, and does not read"),
        (["--slo", "ttft=fast"], "'ttft=fast' cannot be read: write ttft=200ms"),
        (["--capacity"], "give one, such as"),
        (["--capacity", "--slo", "ttft=1s", "--request-rate", "5"], "leave one of them out"),
        (["--request-rate", "1e-300"], "more than a year: raise it"),
        (["-tp", "3"], "3 ranks cannot share equally: take another number of ranks (2, 4, 8, 16 work)"),
        (["--enable-eplb"], "each rank has a part of every expert"),
        (["--expert-loads", "zipf:x"], "an exponent from 0 to 4 is wanted"),
        (["--expert-loads", "zipf:1"], "has no experts: leave --expert-loads out"),
        (["--compare", "enable-lora"], "--enable-lora is not simulated: requests name no adapters"),
        (["--baselines", "-pp", "2"], "--baselines have no stages"),
        (["--baselines", "--compare", "max-num-seqs=2"], "a comparison of its own"),
        (["--request-rate", "-3"], "is not allowed"),
        (["--rate", "5"], "unknown option --rate; did you mean --request-rate?"),
        (["--compare", "max-num-seqz=2"], "unknown option --max-num-seqz; did you mean --max-num-seqs?"),
        (["--compare", "max-num-seqs=many"], "'many' is not allowed"),
        (["--compare", 'eplb-config={"num_redundant_experts":16'], "redundant_experts\":16': braces are not closed"),
        (["--compare", "max-num-seqs=2,,replicas=2"], "'max-num-seqs=2,,replicas=2': a flag is empty"),
        (
            ["--compare", "seed=1", "foo=4"],
            "quire simulate: error: --compare 'foo=4': unknown option --foo\nSee: quire simulate --help\n",
        ),
        (
            ["--compare", "max-num-batched-tokens=many"],
            "quire simulate: error: --compare 'max-num-batched-tokens=many': argument --max-num-batched-tokens",
        ),
        (["--trace", "/no/such", "--workload", "W1"], "give one of them"),
        (["--workload", "W3"], "give --dataset-path"),
        (["--request-rate", "1", "2", "--plot", "curve.html"], "is drawn as .png"),
        (["--max-model-len", "100000000"], "exceeds"),
        (["--workload", "sharegpt", "--num-prompts", "0"], "--num-prompts 0 takes all of a lengths file"),
    ],
)
def test_refusals_say_what_to_do(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["simulate", MODEL, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and message in capsys.readouterr().err


def test_memory_that_is_assumed_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "demo", *SMALL, "--gpu"]
    assert main([*words, "cpu"]) == 0
    assert ", 16.00 GiB (assumed; --gpu-memory says another);" in capsys.readouterr().out
    assert main([*words, "cpu", "--gpu-memory", "16GiB"]) == 0 and main([*words, "h200"]) == 0
    assert "(assumed" not in capsys.readouterr().out


def test_where_nothing_is_completed(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one scheduler among several; and of all, whatever refuses every request."""
    long = ["simulate", MODEL, "--num-prompts", "4", "--input-len", "900", "--max-model-len"]
    assert main([*long, "2048", "--capacity", "--slo", "ttft=1s", "--compare", "max-model-len=512"]) == 2
    assert "so there is no capacity to look for: prompt (900)" in capsys.readouterr().err
    monkeypatch.setattr("quire.cli.simulate.check_lengths", lambda *_: None)
    assert main([*long, "512", "--output-json", str(tmp_path / "r.json")]) == 1
    reason = "context_length_exceeded; the first: prompt (900) plus output (128) is 1028 tokens, the context holds 512"
    assert f"quire simulate: refused: 4 of 4, {reason}" in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "r.json").read_text())["results"]["runs"]
    assert row["refusals"] == {"context_length_exceeded": 4}
    assert main([*long, "512", "--baselines"]) == 2
    assert "no request was completed: prompt (900)" in capsys.readouterr().err


def test_requests_that_are_refused_are_counted_with_their_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "l.json").write_text(json.dumps({"input": [900, 900, 9, 900], "output": [128] * 4}))
    long = ["simulate", MODEL, "--dataset-name", "lengths", "--dataset-path", str(tmp_path / "l.json")]
    long += ["--num-prompts", "0", "--max-model-len", "512"]
    assert main([*long, "--output-json", str(tmp_path / "r.json")]) == 0
    reason = "context_length_exceeded; the first: prompt (900) plus output (128) is 1028 tokens, the context holds 512"
    assert f"quire simulate: refused: 3 of 4, {reason}" in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "r.json").read_text())["results"]["runs"]
    assert row["refusals"] == {"context_length_exceeded": 3}
    some = ["simulate", MODEL, *SMALL, "--max-num-seqs", "2", "--max-num-waiting", "4", "--request-rate", "inf", "1"]
    assert main(some) == 0
    assert "of 24 in 1 of 2 runs, overloaded; the first: " in capsys.readouterr().err


def test_as_many_states_run_at_once_as_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """`quire plan` does the same; one more is refused."""
    words = ["simulate", "shape:mamba2-2.7b", "--num-prompts", "2", "--gpu-memory", "24GiB"]
    assert main(words) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sequences")]
    n = int(line.split()[1].replace(",", ""))
    assert 1 < n < 1024 and "as states of 1,024 leave too little" in line
    assert main([*words, "--max-num-seqs", str(n)]) == 0
    assert main([*words, "--max-num-seqs", str(n + 1)]) == 2
    assert "lower --max-num-seqs" in capsys.readouterr().err


def test_a_calibration_of_the_machine_can_be_given(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads at a tenth of the rate."""
    known = json.loads((CALIBRATIONS / "h200.json").read_text())
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(known | {"read_bytes_per_s": 4.39e11, "source": "as it was made", "error": 0.25}))
    words = ["simulate", MODEL, *SMALL, "--request-rate", "inf"]
    speeds = []
    for more in ([], ["--calibration", str(slow)]):
        assert main([*words, *more, "--output-json", str(tmp_path / "out.json")]) == 0
        speeds.append(json.loads((tmp_path / "out.json").read_text())["results"]["runs"][0]["output_throughput"])
    text = capsys.readouterr().out
    assert speeds[1] < 0.5 * speeds[0] and "measured: as it was made" in text and "times ± 25 %" in text
    for gpu, message in (
        ("h100", "measured on the h200, and --gpu is h100: give --gpu h200"),
        ("cpu", "name that GPU"),
    ):
        assert main([*words, "--calibration", str(slow), "--gpu", gpu]) == 2
        assert message in capsys.readouterr().err


def test_a_trace_with_a_negative_time_is_refused_with_its_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_len,output_len\n0,5,5\n-2,5,5\n")
    assert main(["simulate", MODEL, "--trace", str(path)]) == 2
    assert "line 3: arrival_s is -2" in capsys.readouterr().err
    path.write_text("arrival_s,input_len,output_len\n3,5,5\n2,5,5\n4,9000000,5\n")
    assert main(["simulate", MODEL, "--trace", str(path)]) == 0
    said = capsys.readouterr()
    assert "it was sorted" in said.err and said.out.split("refused")[1].split()[0] == "1"


def test_a_quantised_checkpoint_is_simulated_as_it_is_kept(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((FOLDER / "llama-3.1-8b" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pages = []
    for words in ((), ("--quantization", "none")):
        report = tmp_path / "report.json"
        assert main(["simulate", str(tmp_path), *SMALL, "--gpu", "l4", "--output-json", str(report), *words]) == 0
        said = capsys.readouterr().out.splitlines()[0]
        assert said.endswith("in bfloat16" if words else "in bfloat16, weights in int4-g128")
        pages.append(json.loads(report.read_text())["config"]["n_pages"])
    assert pages[0] > 2 * pages[1], "weights take 5 GiB of 22, not 15"
