"""`quire doctor numerics`: the measures, each path against oracles of others, planted faults, the command's output."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from family_cases import IDS, random_checkpoint

from quire.bench.numerics import attention, model, plot, report
from quire.bench.numerics.attention import Path, Sample, random_sample
from quire.bench.numerics.deviation import BASELINE, FLASH, OURS, ROUNDED, Deviation, Row, deviation, wasserstein
from quire.cli.main import main
from quire.compute.models.decoder import Decoder
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch
from quire.kernels.attention.schedule.plan import Heads
from quire.kernels.attention.variant import Variant

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32)
ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(n_threads)


def of(path: Path, sample: Sample, dtype: str = "bf16") -> Row:
    (row,) = attention.rows(sample, dtype, [path], CPU, {})
    return row


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ([0, 1, 3], [5, 6, 8], 5),  # a shift
        ([3, 0, 1], [8, 5, 6], 5),
        ([0, 0, 2], [0, 1, 1], 2 / 3),
        ([1, 2, 3, 4], [4, 3, 2, 1], 0),  # the same distribution
        ([0, 0, 0, 0], [1, 1, 0, 0], 0.5),
    ],
)
def test_wasserstein_distance_of_known_samples(a: list[float], b: list[float], distance: float) -> None:
    assert wasserstein(torch.tensor(a), torch.tensor(b)) == pytest.approx(distance, abs=1e-15)


def test_wasserstein_distance_of_samples_of_different_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="samples of 3 and 4 numbers"):
        wasserstein(torch.zeros(3), torch.zeros(4))


def test_deviation_of_known_logits() -> None:
    exact = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], dtype=torch.float64)
    got = torch.tensor([[1.0, 3.5, 3.0], [3.0, 2.0, 1.0]])
    found = deviation(got, exact, logits=True)
    assert (found.max_abs, found.mean_abs, found.best_agreement) == (1.5, 0.25, 0.5)
    assert 0 < found.wasserstein <= found.mean_abs and deviation(got, exact).best_agreement is None
    assert math.isnan(deviation(torch.full_like(got, math.nan), exact).max_abs)


@pytest.mark.parametrize("window", [0, 19])
@pytest.mark.parametrize("n_keys", [16, 64, 256])
def test_in_float64_every_way_is_the_same(n_keys: int, window: int) -> None:
    """Softmax written out, tiles, torch's own and the reference of the library agree: the baseline is right."""
    sample = dataclasses.replace(random_sample(HEADS, 90, seed=1), variant=Variant(0.2, window=window))
    exact = attention.written_out(sample)
    (of_library,) = (p for p in attention.paths(CPU) if (p.name, p.tile) == ("reference", "all rows"))
    for got in (
        attention.flash_in_one_type(sample, n_keys), attention.torch_sdpa(sample), of_library.run(sample)
    ):  # fmt: skip
        assert (got - exact).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_kernel_whose_scale_is_off_by_one_percent_is_seen(dtype: str) -> None:
    sample, best = random_sample(HEADS, 200, seed=2), attention.kernel_path(CPU)

    def off(given: Sample) -> torch.Tensor:
        return best.run(dataclasses.replace(given, variant=Variant(1.01 * given.variant.scale)))

    right, wrong = of(best, sample, dtype), of(dataclasses.replace(best, run=off), sample, dtype)
    assert wrong.deviation.mean_abs > (2 if dtype == "bf16" else 1000) * right.deviation.mean_abs
    assert wrong.times_baseline is not None and right.times_baseline is not None
    assert wrong.times_baseline > 1 > right.times_baseline or dtype == "fp32"


def test_a_kernel_that_forgets_a_page_is_seen() -> None:
    sample, best = random_sample(HEADS, 200, seed=2), attention.kernel_path(CPU)

    def forgets(given: Sample) -> torch.Tensor:
        return best.run(dataclasses.replace(given, k=given.k.clone().index_fill_(0, torch.arange(32, 48), 0)))

    forgetful = of(dataclasses.replace(best, run=forgets), sample)
    assert forgetful.deviation.max_abs > 20 * of(best, sample).deviation.max_abs


def test_every_path_of_a_cpu_has_its_row() -> None:
    sample = random_sample(HEADS, 150, seed=0)
    skipped: dict[str, str] = {}
    found = list(attention.rows(sample, "bf16", attention.paths(CPU), CPU, skipped))
    assert not skipped and all(0 < row.deviation.max_abs < 0.2 for row in found)
    assert found[0].kind == BASELINE and found[0].times_baseline == 1
    names = {(row.path, row.tile) for row in found}
    assert {("reference", "all rows"), ("reference, int8 keys", "all rows"), ("flash in one type", "64 keys")} <= names
    assert {row.kind for row in found} >= {BASELINE, FLASH, OURS, ROUNDED}
    ours = {row.tile: row.deviation for row in found if row.path == attention.kernel_path(CPU).name}
    if len(ours) > 1:  # there are native kernels; no cut of rows changes a bit of their outputs
        assert ours["1 row"] == ours["16 rows"] == ours["all rows"] and {"2 pieces", "8 pieces"} <= ours.keys()


def test_flash_in_one_type_grows_with_the_number_of_tiles() -> None:
    """What the paper describes, where sums are kept in 16 bits; our kernels beside it do not."""
    found = list(attention.rows(random_sample(HEADS, 1024, seed=0), "bf16", attention.paths(CPU), CPU, {}))
    ratio = {(row.kind, row.tile): row.times_baseline or 0 for row in found}
    assert ratio[FLASH, "16 keys"] > ratio[FLASH, "64 keys"] > ratio[FLASH, "256 keys"] > 1 > ratio[OURS, "all rows"]


def test_paths_of_a_gpu_in_the_interpreter() -> None:
    """Their plans, pieces and low-precision keys; of float8 keys the deviation is that of three bits of fraction."""
    pytest.importorskip("triton")
    script = pathlib.Path(__file__).with_name("interpreted_numerics.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]


class Checkpoint:
    """A small random model, and transformers' of it."""

    def __init__(self, folder: pathlib.Path, family: str = "Qwen3", **fields: object) -> None:
        self.oracle, self.folder = random_checkpoint(folder, family, **fields), folder
        self.arch = read_arch(folder)
        self.ids = torch.tensor(IDS)

    def load(self, dtype: torch.dtype, device: torch.device, rounding: str) -> Decoder:
        return load_model(
            self.folder, self.arch, dtype=dtype, device=device, max_model_len=128, quantization=rounding,
            progress=False,
        )  # fmt: skip

    def exact(self) -> model.Exact:
        return model.run_exact(self.load, self.arch, self.ids, [8, 40], [0, 2])


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_the_float64_model_is_that_of_transformers(family: str, tmp_path: pathlib.Path) -> None:
    """Gemma 2: windows, and logits with a cap, which the baseline of attention does not write out."""
    made = Checkpoint(tmp_path, family, head_dim=32)
    exact = made.exact()
    theirs = made.oracle.double()(made.ids[None]).logits[0]
    assert (exact.logits[40] - theirs).abs().max() < 1e-5  # transformers has its norms in float32
    assert torch.equal(exact.logits[8].argmax(-1), theirs[:8].argmax(-1))
    pages = model.Pages(made.arch, torch.float64, 40, CPU)
    chunked = model.logits_of(exact.model, pages, made.ids, torch.arange(40), 7, made.arch.vocab_size)
    assert (chunked - exact.logits[40]).abs().max() < 1e-10
    assert exact.samples.keys() == {0, 2} and exact.samples[2].q.shape == (40, 4, 32)


def test_logits_of_a_part_of_the_positions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Checkpoint(tmp_path)
    whole = made.exact().logits[40]
    monkeypatch.setattr(model, "MAX_VALUES", 3 * made.arch.vocab_size)
    few = made.exact()
    assert len(few.logits[40]) == 3
    assert (few.logits[40] - whole[[0, 19, 39]]).abs().max() < 1e-12
    pages = model.Pages(made.arch, torch.float64, 40, CPU)
    chunked = model.logits_of(few.model, pages, made.ids, model.kept_rows(40, made.arch.vocab_size), 16, 256)
    assert (chunked - few.logits[40]).abs().max() < 1e-10


def test_rows_of_a_model_and_a_planted_fault(tmp_path: pathlib.Path) -> None:
    made = Checkpoint(tmp_path)
    exact = made.exact()
    alone = {BASELINE: attention.paths(CPU)[0], OURS: attention.kernel_path(CPU)}

    def rows(load: model.Load, dtype: str = "bf16") -> dict[str, Deviation]:
        listed = model.rows(exact, load, made.ids, dtype, CPU, alone, {}, ["int8", "int4"])
        return {row.path: row.deviation for row in listed if row.length == 40 and row.tile == "whole"}

    def wrong(*given: object) -> Decoder:
        loaded = made.load(*given)  # type: ignore[arg-type]
        loaded.norm.weight.mul_(1.01)
        return loaded

    right = rows(made.load)
    assert right["attention alone: softmax written out"].mean_abs < right["all"].mean_abs
    assert right["all"].mean_abs < right["all, int8 weights"].mean_abs < right["all, int4 weights"].mean_abs
    assert right["all"].best_agreement is not None and right["all"].best_agreement > 0.8
    in_float32, planted = rows(made.load, "fp32")["all"], rows(wrong, "fp32")["all"]
    assert in_float32.max_abs < 1e-4 and planted.mean_abs > 100 * in_float32.mean_abs


def test_a_transform_leaves_the_baseline_out(tmp_path: pathlib.Path) -> None:
    made = Checkpoint(tmp_path, "Gemma2", head_dim=32)
    skipped: dict[str, str] = {}
    alone = {BASELINE: attention.paths(CPU)[0], OURS: attention.kernel_path(CPU)}
    found = list(model.rows(made.exact(), made.load, made.ids, "bf16", CPU, alone, skipped))
    assert list(skipped) == ["attention alone: softmax written out, bf16"]
    assert any(row.path.startswith("attention alone") and row.kind == OURS for row in found)


def row(kind: str, ratio: float, dtype: str = "bf16", length: int = 64) -> Row:
    figures = Deviation(0.1, 0.01, 0.005)
    return Row("attention", "random", dtype, f"{kind} path", kind, "all rows", length, figures, ratio)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.5, "do not show it, 0.50 times"), (3.0, "show some of it"), (11.0, "show it, 11.00"), (math.nan, "NaN")],
)
def test_the_verdict_follows_the_ratio(ratio: float, words: str) -> None:
    text = "\n".join(report.verdict([row(BASELINE, 1.0), row(OURS, ratio), row(FLASH, 8.0)]))
    assert words in text and "every value in bf16: 8.00 times" in text
    assert "show" not in "\n".join(report.verdict([row(BASELINE, 1.0, "fp32"), row(OURS, ratio, "fp32")]))


def test_lines_have_the_longest_sequence_first_and_a_plot_has_every_line(tmp_path: pathlib.Path) -> None:
    rows = [row(BASELINE, 1.0, length=16), row(BASELINE, 1.0), row(OURS, 0.5, length=16), row(OURS, 0.5)]
    head, baseline, ours = report.lines(rows)
    assert "64 tokens" in head and head.endswith("16") and "1.00" in baseline and "0.50" in ours
    path = tmp_path / "it.html"
    plot.write_numerics_plot(str(path), rows, "a < b")
    page = path.read_text()
    assert "a &lt; b" in page and page.count("<circle") == 4 and "ours path (all rows)" in page
    if importlib.util.find_spec("matplotlib") is not None:
        plot.write_numerics_plot(str(tmp_path / "it.png"), rows, "it")
        assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    broken = dataclasses.replace(rows[0], deviation=Deviation(math.nan, math.nan, math.nan))
    plot.write_numerics_plot(str(path), [broken], "nothing to draw")


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, out = Checkpoint(tmp_path / "made"), tmp_path / "it.json"
    words = ["doctor", "numerics", str(made.folder), "--dtype", "bf16", "--lengths", "16", "80", "200", "--json"]
    assert main([*words, str(out), "--plot", str(tmp_path / "it.html")]) == 0
    text = capsys.readouterr().out
    assert "attention, random, bf16, 200 tokens" in text and "model, prompt, bf16, 80 tokens" in text
    assert "left out: the model, 200 tokens: more than its context" in text and "Golden et al. 2024" in text
    made_of = json.loads(out.read_text())
    assert made_of["benchmark"] == "numerics" and made_of["config"]["lengths"] == [16, 80, 200]
    results = made_of["results"]
    assert {one["inputs"] for one in results["rows"]} == {"random", "layer 0", "layer 2", "prompt"}
    assert {one["length"] for one in results["rows"]} == {16, 80, 200}
    fields = {"part", "inputs", "dtype", "path", "kind", "tile", "length", "max_abs", "mean_abs", "wasserstein"}
    assert all(one.keys() == fields | {"best_agreement", "times_baseline"} for one in results["rows"])
    assert results["verdict"] and results["left_out"]["the model, 200 tokens"] == "more than its context"
    chunked = [one for one in results["rows"] if one["tile"] == "64 tokens"]
    assert [one["length"] for one in chunked] == [80] and chunked[0]["best_agreement"] > 0.5
    assert "<svg" in (tmp_path / "it.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "'nowhere' is neither a folder nor a file here; doctor fetches nothing"),
        (["--lengths", "16", "99999"], "--lengths: '99999' is not allowed: it must be an integer between 1 and 16384"),
        (["--text", "nothing.txt"], "--text 'nothing.txt' cannot be read: No such file or directory"),
        (["--text", "short.txt", "--lengths", "16", "600"], "tokens, --lengths asks for 600: give a longer text"),
        (["--text", "bytes.bin"], "--text 'bytes.bin' is not UTF-8"),
        (["--plot", "it.pdf"], "--plot 'it.pdf': the name must end with .png or .html"),
        (["--json", "no/it.json"], "--json 'no/it.json': the folder does not exist"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    words: list[str], message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Hello")
    (tmp_path / "bytes.bin").write_bytes(b"\xff\xfe")
    assert main(["doctor", "numerics", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_too_little_memory_is_said_with_both_sizes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.bench.machine.memory_bytes", lambda: (1 << 20, 1 << 20))
    assert main(["doctor", "numerics"]) == 2
    error = capsys.readouterr().err
    assert "the baseline is the model in float64" in error and "1.00 MiB are free" in error
