"""Error bars are what recorded runs lay beside their expectations, by kind; what is known to be worse says so."""

from __future__ import annotations

import msgspec
import pytest

from quire.bench.shape import FOLDER
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.accelerators import accelerator_named, calibration_for
from quire.planner.calibration import Calibration, Record
from quire.planner.cost import calibrated
from quire.planner.error_bar import error_bar, error_words, farthest, kinds_of, record_of
from quire.planner.formats import formats_named
from quire.planner.timing import StepTimer

WINDOWS, EXPERTS, RANKS = "two kinds of windows", "experts", "layers divided among ranks (tp)"


def timer(shape: str, weights: str = "auto", kv: str = "auto", gpu: str = "h200", **mesh: int) -> StepTimer:
    return calibrated(
        read_arch(FOLDER / shape), accelerator_named(gpu), formats=formats_named(weights, kv), mesh=Mesh(**mesh)
    ).timer


def with_records(*records: tuple[set[str], float], error: float = 0.02, source: str = "a run") -> Calibration:
    return msgspec.structs.replace(
        calibration_for(accelerator_named("h200")), error=error, source=source,
        records=tuple(Record(kinds=tuple(kinds), n_figures=2, error=one) for kinds, one in records),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        (("llama-3.1-8b",), set()),
        (("mistral-7b-v0.3",), set()),
        (("gemma-3-1b",), {WINDOWS}),
        (("gpt-oss-20b", "mxfp4"), {WINDOWS, EXPERTS, "weights in mxfp4"}),
        (("deepseek-v2-lite",), {EXPERTS, "latent attention"}),
        (("qwen3-next-80b-a3b",), {EXPERTS, "recurrent layers"}),
        (("llama-3.1-8b", "fp8", "fp8"), {"weights in fp8", "keys and values in fp8"}),
    ],
)
def test_what_a_plain_model_has_not(asked: tuple[str, ...], kinds: set[str]) -> None:
    assert kinds_of(timer(*asked)) == kinds


def test_ranks_are_a_kind_and_replicas_are_not() -> None:
    assert kinds_of(timer("llama-3.1-8b", tp=2)) == {RANKS}
    assert kinds_of(timer("llama-3.1-8b", pp=2)) == {"stages (pp)"}
    assert kinds_of(timer("llama-3.1-8b", sp=2)) == {"tokens divided among ranks (sp)"}
    assert kinds_of(timer("qwen3-30b-a3b", ep=2)) == {EXPERTS, "experts divided among ranks (ep)"}
    assert not kinds_of(timer("llama-3.1-8b", dp=2))


def test_runs_that_are_alike_speak_and_no_bar_is_narrower_than_a_plain_one() -> None:
    known = with_records((set(), 0.10), ({WINDOWS}, 1.4), ({EXPERTS, WINDOWS}, 0.3), ({RANKS}, 0.04))
    bars = {
        frozenset(kinds): farthest(frozenset(kinds), known)[1]
        for kinds in (set(), {EXPERTS, WINDOWS}, {WINDOWS}, {RANKS})
    }
    assert list(bars.values()) == [0.10, 0.3, 1.4, 0.10]


def test_what_no_run_had_widens_the_bar_of_those_that_are_nearest() -> None:
    known = with_records((set(), 0.10), ({EXPERTS}, 0.2), ({EXPERTS, WINDOWS}, 0.9))
    assert farthest(frozenset({EXPERTS, RANKS}), known)[1] == pytest.approx(0.3), "one of them was never there"
    assert farthest(frozenset({"states", RANKS}), known)[1] == pytest.approx(0.3), "two were not"
    nearer = with_records((set(), 0.10), ({WINDOWS}, 0.9), ({EXPERTS}, 0.5), ({EXPERTS, WINDOWS}, 0.2))
    assert farthest(frozenset({EXPERTS, WINDOWS, RANKS}), nearer)[1] == pytest.approx(0.3), "what has most of it counts"
    both = with_records((set(), 0.10), ({EXPERTS}, 0.2), ({RANKS}, 0.15))
    assert farthest(frozenset({EXPERTS, RANKS}), both)[1] == pytest.approx(0.3), "never together"


def test_a_calibration_without_records_has_its_own_error_and_an_assumed_one_adds_it() -> None:
    plain = timer("llama-3.1-8b")
    for records, source, bar in (((), "a run", 0.3), ((), "assumed", 0.3), (((set(), 0.1),), "a run", 0.3),
                                 (((set(), 0.1),), "assumed", 0.4)):  # fmt: skip
        known = with_records(*records, error=0.3, source=source)
        assert error_bar(StepTimer(plain.arch, known, plain.formats, Mesh())) == pytest.approx(bar)


def test_words_say_which_plans_are_worse() -> None:
    assert "gemma-3-1b 32 x 32,000" in error_words(timer("gemma-3-1b"))
    for name in ("llama-3.1-8b", "deepseek-v2-lite"):
        assert error_words(timer(name)) == ""


def test_a_calibration_of_ones_own_has_no_runs_to_name() -> None:
    """`quire bench calibrate` writes how far off its steps are, and compares no models."""
    plain = timer("llama-3.1-8b")
    own = msgspec.structs.replace(plain.calibration, records=(Record(kinds=(), n_figures=16, error=0.42),))
    words = error_words(StepTimer(plain.arch, own, plain.formats, Mesh()))
    assert words == "plain models: nine of ten steps of the calibration are within 42 % of what it expects"


def test_a_factor_counts_either_way() -> None:
    found = record_of(frozenset({"b", "a"}), [(1.2, "slower"), (0.5, "faster")])
    assert found == Record(kinds=("a", "b"), n_figures=2, error=1.0, farthest="faster")
