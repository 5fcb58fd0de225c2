"""`quire plan train` as it is typed: what it prints, its JSON and pictures, and what it refuses."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from quire.cli.command import run
from quire.planner.scaling.laws import LAWS, ParametricLaw, mixture_law

SHAPE = "shape:llama-3.1-8b"
TRAIN = ("plan", "train")


@pytest.fixture
def runs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file of 40 runs under a law, with some noise."""
    law, random = LAWS["besiroglu"], np.random.default_rng(0)
    assert isinstance(law, ParametricLaw)
    rows = []
    for _ in range(40):
        n, d = 10 ** random.uniform(8, 10), 10 ** random.uniform(9.5, 11.5)
        rows.append(f"{n:.6g},{d:.6g},{law.loss(n, d) * np.exp(2e-3 * random.standard_normal()):.6g}")
    path = tmp_path / "runs.csv"
    path.write_text("N,D,L\n" + "\n".join(rows) + "\n")
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run([*TRAIN, *words]) == code
    return capsys.readouterr().out


def figures(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, object]:
    found = json.loads(answer(capsys, *words, "--json", code=code))
    assert isinstance(found, dict)
    return found


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code = run([*TRAIN, *words])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    assert code == 2
    return capsys.readouterr().err


def test_a_budget_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "--budget", "5.76e23", "flops")
    assert "5.76e+23 FLOPs" in text and "72.2B parameters on 1.33T tokens, 18.4 a parameter, loss 1.9744" in text
    assert "chinchilla-1" in text and "67.9B" in text and "kaplan" in text


def test_three_ways_to_say_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    hours = 1e24 / (989.4e12 * 0.4) / 3600
    by_flops = figures(capsys, "--budget", "1e24", "--mfu", "0.4")
    by_hours = figures(capsys, "--gpu-hours", f"{hours:.9g}", "--mfu", "0.4")
    by_dollars = figures(capsys, "--dollars", f"{2.5 * hours:.9g}", "--price", "2.5", "--mfu", "0.4")
    best = LAWS["besiroglu"].optimum(1e24)
    for found in (by_flops, by_hours, by_dollars):
        assert found["best"]["n_parameters"] == pytest.approx(best.n_parameters)  # type: ignore[index]
        assert found["budget"]["hours"] == pytest.approx(hours)  # type: ignore[index]


def test_budgets_of_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """The line of Hoffmann et al. 2022, table 3: 10 billion, 1.23e22, 205.1 billion."""
    text = answer(capsys, "--sizes", "1B", "10B", "--law", "chinchilla-1")
    assert text.splitlines()[-1].split() == ["10.0B", "1.23e+22", "205B", "20.5", "-"]
    found = figures(capsys, "--sizes", "1B", "10B", "--law", "kaplan")["sizes"]
    for one in found:  # type: ignore[attr-defined]
        assert LAWS["kaplan"].optimum(one["flops"]).n_parameters == pytest.approx(one["n_parameters"])


def test_laws_and_mixtures_and_serving(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--budget", "1e22", "--experts", "8")
    best = mixture_law(8).optimum(1e22)
    assert found["best"]["n_parameters"] == pytest.approx(best.n_parameters)  # type: ignore[index]
    assert found["best"]["n_parameters_in_all"] == pytest.approx(best.n_parameters * 76 / 13)  # type: ignore[index]
    served = figures(capsys, "--budget", "1e23", "--law", "sardana", "--serve-tokens", "10T", "--serve-mfu", "0.15")
    assert served["cheapest"]["total_flops"] < served["plain"]["total_flops"]  # type: ignore[index]
    assert served["cheapest"]["loss"] == pytest.approx(served["plain"]["loss"])  # type: ignore[index]
    text = answer(capsys, "--budget", "1e23", "--serve-tokens", "10T", "--serve-mfu", "0.15")
    assert "each FLOP as 3 of training" in text and "saved" in text


def test_a_fit_with_and_without_a_budget(capsys: pytest.CaptureFixture[str], runs: pathlib.Path) -> None:
    text = answer(capsys, "--fit", str(runs))
    assert "40 runs" in text and "95 % of 400 resampled fits" in text and "best model" not in text
    found = figures(capsys, "--fit", str(runs), "--budget", "1e22")
    best = LAWS["besiroglu"].optimum(1e22)
    low, high = found["best"]["intervals"]["n_parameters"]  # type: ignore[index]
    assert low < best.n_parameters < high
    assert "95 % of fits" in answer(capsys, "--fit", str(runs), "--budget", "1e22")


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_the_picture_has_a_line_for_each_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, suffix: str
) -> None:
    path = tmp_path / f"curves.{suffix}"
    assert str(path) in answer(capsys, "--budget", "1e22", "--plot", str(path))
    if suffix == "html":
        text = path.read_text()
        assert text.count("<circle") == 5 and "1e+22 FLOPs: 9.05B" in text
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_model_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, SHAPE, "--gpus", "64", "--zero", "3", "--price", "2", "--tokens", "1T")
    assert "8.03B parameters" in text and "64 h100: 64 replicas; ZeRO 3" in text and ": fits" in text
    assert "15 micro-batches of 1 x 4,096" in text and "at $2 an hour" in text and "replicas" in text


def test_a_model_that_does_not_fit_is_told_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, SHAPE, "--gpus", "8", "--zero", "0", code=1)
    assert "does NOT fit" in text and "what fits       --gpus 8 --zero 1 --checkpointing none" in text
    other = figures(capsys, SHAPE, "--gpus", "8", "--zero", "1", "--checkpointing", "none")
    assert other["fits"] and figures(capsys, SHAPE, "--gpus", "8", "--zero", "0", code=1)["fits_instead"]
    assert "--gpus 2 is the least" in answer(capsys, SHAPE, "--gpus", "1", code=1)


def test_figures_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(
        capsys, SHAPE, "--gpus", "64", "--tp", "8", "--pp", "2", "--tokens", "2T", "--price", "3", "--mfu", "0.4",
        "--checkpointing", "selective", "--store-scores", "--gradients", "fp32", "--master-weights", "none",
        "--optimizer", "adam-8bit", "--no-sequence-parallel", "--dropout", "--count-masked", "--micro-batch", "2",
        "--seq-len", "8k", "--batch-tokens", "8M", "--gpu", "h200",
    )  # fmt: skip
    setup = found["setup"]
    assert isinstance(setup, dict) and setup["gradient_bytes"] == 4 and setup["master_bytes"] == 0
    assert setup["seq_len"] == 8000 and not setup["sequence_parallel"] and setup["dropout"] and setup["stores_scores"]
    assert found["n_replicas"] == 4 and found["model_utilisation"] == pytest.approx(0.4)
    assert found["dollars"] == pytest.approx(3 * found["device_hours"])  # type: ignore[operator]
    assert found["memory_bytes"]["total"] == pytest.approx(sum(  # type: ignore[index]
        n for name, n in found["memory_bytes"].items() if name != "total"  # type: ignore[attr-defined]
    ))  # fmt: skip


def test_how_long_a_model_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    by_budget = figures(capsys, SHAPE, "--budget", "1e23")
    assert by_budget["n_tokens"] * by_budget["flops_a_token"]["training"] == pytest.approx(1e23)  # type: ignore
    by_law = figures(capsys, SHAPE, "--law", "chinchilla-1")
    assert by_law["n_tokens"] / by_law["n_active_parameters"] == pytest.approx(20.5, rel=0.01)  # type: ignore[operator]
    assert by_law["loss"] is None


@pytest.mark.parametrize(("words", "message"), [
    ((), "give a MODEL to train, a budget"),
    (("--budget", "0"), "--budget '0' is out of range: give a number above 0"),
    (("--budget", "-1e20"), "expected at least one argument|out of range"),
    (("--budget", "many"), "--budget 'many' is not a number"),
    (("--budget", "1e20", "--tokens", "1T"), "--tokens says how MODEL is trained, and there is none: name one"),
    (("--budget", "1e20", "--tp", "4"), "--tp says how MODEL is trained"),
    (("--budget", "1,5e20"), "--budget '1,5e20' is not a number"),
    (("--budget", "1e20", "hours"), "'hours' is not understood"),
    (("--budget", "1e20", "--gpu-hours", "5"), "--budget and --gpu-hours: give one budget"),
    (("--dollars", "1M"), "--dollars needs --price"),
    (("--budget", "1e20", "--law", "chinchila"), "'chinchila' is unknown.*chinchilla"),
    (("--budget", "1e20", "--law", "kaplan", "--experts", "4"), "give one of them"),
    (("--budget", "1e20", "--experts", "0"), "--experts 0 is out of range"),
    (("--budget", "1e20", "--serve-tokens", "1e300"), "--serve-tokens '1e300' is out of range: at most 1e"),
    (("--budget", "1e20", "--experts", "999"), "--experts 999 is out of range"),
    (("--budget", "1e20", "--law", "chinchilla-2", "--serve-tokens", "1T"), "chinchilla-2 is none"),
    (("--budget", "1e20", "--law", "chinchilla-2", "--plot", "a.html"), "not how good"),
    (("--budget", "1e20", "--plot", "a.pdf"), "must end with .png or .html"),
    (("--budget", "1e20", "--mfu", "40"), "--mfu 40 is out of range"),
    (("--budget", "1e20", "--mfu", "0"), "--mfu 0 is out of range"),
    (("--dollars", "1M", "--price", "0"), "--price 0 buys hours without end"),
    (("--budget", "1e400"), "--budget '1e400' is out of range: at most 1e.30"),
    (("--gpu-hours", "1e300"), "--gpu-hours '1e300' is out of range: at most 1e.30"),
    (("--gpu-hours", "1e29"), "--gpu-hours '1e29' is out of range: on H100 .* at most 1e.30; give .*e.11 or"),
    (("--dollars", "1e30", "--price", "2"), "--dollars '1e30' is out of range: .* at most 1e.30; give .*e.12 or"),
    ((SHAPE, "--gpu-hours", "1e29"), "--gpu-hours '1e29' is out of range: on H100 it is"),
    (("--gpu-hours", ""), "--gpu-hours '' is not a number"),
    ((SHAPE, "--dollars", "", "--price", "2"), "--dollars '' is not a number"),
    ((SHAPE, "--tokens", "1e300"), "--tokens '1e300' is out of range: at most 1e.24"),
    ((SHAPE, "--tokens", "0.5"), "--tokens '0.5' is out of range: at least 1"),
    ((SHAPE, "--batch-tokens", "1e300"), "--batch-tokens '1e300' is out of range: at most 1e.24"),
    ((SHAPE, "--seq-len", "1e300"), "--seq-len '1e300' is out of range: at most"),
    ((SHAPE, "--gpu-hours", "1e-9"), "pays for .* tokens of MODEL, and 1 to 1e.24 are possible"),
    ((SHAPE, "--dollars", "1e20", "--price", "1e-300"), "--price 1e-300 is out of range"),
    ((SHAPE, "--mfu", "1e-300"), "--mfu 1e-300 is out of range: a part of the peak is 0.0001 to 1"),
    (("--budget", "1"), "1 FLOPs is too small for besiroglu.*1.00M"),
    (("--budget", "1e20", "--experts", "65"), "--experts 65 is out of range: 1 to 64 are possible"),
    (("--budget", "1e20", "--mfu", "0.4", "--hfu", "0.4"), "give one of them"),
    (("--budget", "1e20", "--gpu", "h101"), "--gpu 'h101' is unknown"),
    (("--budget", "1e20", "--price", "-2"), "--price -2 is out of range"),
    (("--fit", "none.csv"), "cannot be read"),
    (("none-such",), "'none-such' is neither a folder"),
    ((SHAPE, "--gpus", "0"), "--gpus 0 is out of range"),
    ((SHAPE, "--gpus", "12", "--tp", "8"), "take a multiple of 8"),
    ((SHAPE, "--tp", "3", "--gpus", "3"), "32 query heads"),
    ((SHAPE, "--tokens", "1T", "--budget", "1e20"), "give one of them"),
    (("--sizes", "0"), "--sizes '0' is out of range"),
    ((SHAPE, "--sizes", "1B"), "leave MODEL out"),
    ((SHAPE, "--gpu", "here"), "planned for a device by its name"),
    ((SHAPE, "--serve-tokens", "1T"), "leave MODEL out"),
    ((SHAPE, "--seq-len", "10.5"), "'10.5' is not a whole number"),
    ((SHAPE, "--zero", "4"), "--zero = 4 is not one of 0, 1, 2, 3"),
])  # fmt: skip
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert re.search(message, complaint(capsys, *words))


def test_many_tokens_make_no_long_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "train", SHAPE, "--tokens", "1e24", "--batch-tokens", "1e24", "--mfu", "0.0001"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 130


def test_few_hours_are_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, "--gpu-hours", "0.5", "--price", "0.3"]) == 0
    assert "0.5 h100-hours at 0.45 of the peak, $0.15 at $0.3 an hour" in capsys.readouterr().out
    assert run([*TRAIN, "--budget", "2,000,000e16", "--gpu", "h100"]) == 0
    assert "2e+22 FLOPs: 12,478 h100-hours" in capsys.readouterr().out
    assert "`here`" not in complaint(capsys, "--budget", "1e20", "--gpu", "tpu")


def test_what_is_otherwise_than_asked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, SHAPE, "--batch-tokens", "1", "--seq-len", "200000"]) == 1
    said = capsys.readouterr().err
    assert "--seq-len 200,000 is beyond the model's context of 131,072 tokens" in said
    assert "--batch-tokens 1 is less than a micro-batch on every replica: a step takes 1.60M tokens" in said
    assert "does not fit on 8 x H100 so: " in said
    assert run([*TRAIN, SHAPE]) == 0 and not capsys.readouterr().err
    assert run([*TRAIN, SHAPE, "--price", "0", "--budget", "1e22"]) == 0
    assert "what the budget pays for" in capsys.readouterr().out


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        f"main(['plan', 'train', '{SHAPE}', '--gpus', '64'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_traffic_that_takes_longer_than_the_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("shape:mixtral-8x7b", "--gpus", "64", "--tokens", "1T", "--tp", "8")
    assert run([*TRAIN, *words, "--zero", "3"]) == 0
    text = capsys.readouterr().out
    (sent_s, step_s), (longest_s, share, stated_s) = (
        tuple(map(float, re.search(pattern, text).groups()))  # type: ignore[union-attr]
        for pattern in (
            r"replicas .* at least (\S+) s of a step of (\S+) s",
            r"too much +so that a step takes (\S+) s, at (\S+) of the peak, and not (\S+) s",
        )
    )
    assert sent_s == longest_s > step_s == stated_s
    assert share == pytest.approx(0.45 * step_s / sent_s, rel=0.1)
    assert run([*TRAIN, *words, "--zero", "1"]) == 0 and "too much  " not in capsys.readouterr().out
