"""How often experts are chosen, what each rank has of that, and what copies and moves do about it."""

from __future__ import annotations

import json
import pathlib
import random

import msgspec
import pytest
from planner_shapes import LLAMA_8B

from quire.bench.shape import FOLDER
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.planner.accelerators import accelerator_named
from quire.planner.cost import calibrated
from quire.planner.expert_loads import ExpertLoads, chosen, read_loads, spread
from quire.planner.expert_placement import imbalance
from quire.planner.formats import Formats
from quire.planner.operators import prefill_spans
from quire.planner.parts import Product, rank_parts
from quire.planner.placement import Limits, place

DEEPSEEK, MIXTRAL = (read_arch(FOLDER / name) for name in ("deepseek-v3", "mixtral-8x7b"))
SKEWED = ExpertLoads(words="zipf:1.0", exponent=1.0)
EP8 = Mesh(tp=8, ep=8)


def experts(loads: ExpertLoads, mesh: Mesh = EP8) -> Product:
    return next(one for one in rank_parts(DEEPSEEK, mesh, Formats(), loads).products if one.is_experts)


def test_chances_are_those_of_loads_and_nobody_is_taken_twice() -> None:
    assert chosen([2, 1, 1], 1) == [0.5, 0.25, 0.25]
    assert chosen([10, 1, 1, 1, 1], 2) == [1.0, 0.25, 0.25, 0.25, 0.25]
    assert chosen([8, 4, 1, 1], 3) == [1.0, 1.0, 0.5, 0.5]
    assert chosen([5, 0, 0], 1) == [1.0, 0.0, 0.0]
    assert chosen([5, 0, 0], 2) == [1.0, 0.0, 0.0]
    assert chosen([1e300, 1e300, 1, 1, 2], 3) == [1.0, 1.0, 0.25, 0.25, 0.5]
    assert sum(chosen([1e300, 5e-324, 5e-324], 2)) == 2.0


def test_rows_and_reads_are_those_of_drawn_rows() -> None:
    """300 rows of 8 experts, drawn one by one by their loads; the busiest rank of 8 has what the formula says."""
    one, rng, n_rows = experts(SKEWED), random.Random(5), 300
    chances = [chance for rank in one.chances for chance in rank]
    own = len(chances) // 8
    pairs, touched = [0] * 8, [set[int]() for _ in range(8)]
    for _ in range(n_rows):
        for expert, chance in enumerate(chances):
            if rng.random() < chance:
                pairs[expert // own] += 1
                touched[expert // own].add(expert)
    assert sum(chances) == pytest.approx(8)
    assert one.products_of_row * n_rows == pytest.approx(max(pairs), rel=0.05)
    assert one.read_bytes(n_rows) / one.n_bytes == pytest.approx(max(map(len, touched)), rel=0.05)


def test_even_loads_are_what_nothing_said_is() -> None:
    plain, even = experts(ExpertLoads()), experts(ExpertLoads(n_redundant=0))
    assert plain == even and plain.chances == ()
    said = experts(ExpertLoads(layers=((1.0,) * 256,)))
    assert said.read_bytes(17) == pytest.approx(plain.read_bytes(17)) and said.flops(9) == pytest.approx(plain.flops(9))


def test_moves_and_copies_even_loads_out() -> None:
    stay, move = spread(SKEWED, 256, 8, 8), spread(msgspec.structs.replace(SKEWED, n_redundant=0), 256, 8, 8)
    copied = spread(msgspec.structs.replace(SKEWED, n_redundant=32), 256, 8, 8)
    assert stay.imbalance == stay.in_turn > 1.7 > 1.3 > move.imbalance > 1.02 > copied.imbalance
    assert move.in_turn == stay.in_turn and stay.n_arriving == 0 < move.n_arriving <= 32
    assert {len(rank) for rank in copied.ranks} == {36} and sum(map(sum, copied.ranks)) == pytest.approx(8)


def test_the_imbalance_is_that_of_the_engine() -> None:
    loads = tuple(float(n) for n in random.Random(2).sample(range(1, 1000), 64))
    found = spread(ExpertLoads(words="a file", layers=(loads,)), 64, 2, 4)
    assert found.imbalance == pytest.approx(imbalance(loads, range(64), 4))
    assert [sum(rank) for rank in found.ranks] == pytest.approx(
        [2 * sum(loads[at : at + 16]) / sum(loads) for at in (0, 16, 32, 48)]
    )


def test_copies_that_are_not_moved_yet_lie_in_turn() -> None:
    found = spread(ExpertLoads(n_redundant=32, are_in_turn=True), 256, 8, 8)
    assert found.imbalance == found.in_turn > 1.1 and found.n_arriving == 0


def test_a_rank_keeps_its_copies() -> None:
    few, many = (place(DEEPSEEK, 300e9, EP8, Formats(), Limits(), ExpertLoads(n_redundant=n)) for n in (0, 64))
    one = experts(ExpertLoads())
    matrix_bytes = sum(
        each.n_times * each.n_bytes for each in rank_parts(DEEPSEEK, EP8, Formats()).products if each.is_experts
    )
    assert one.n_of == 32 and many.weights_bytes - few.weights_bytes == pytest.approx(8 * matrix_bytes, rel=1e-6)


def test_a_prompt_waits_for_the_busiest_rank() -> None:
    def prompt_s(loads: ExpertLoads) -> float:
        cost = calibrated(DEEPSEEK, accelerator_named("h200"), mesh=EP8, loads=loads)
        return cost.step_s(prefill_spans(8192))

    even, skewed, moved = (
        prompt_s(one) for one in (ExpertLoads(), SKEWED, msgspec.structs.replace(SKEWED, n_redundant=32))
    )
    assert skewed > 1.15 * even and moved < 1.05 * even


def test_one_device_has_all_experts() -> None:
    one = experts(SKEWED, Mesh())
    assert len(one.chances) == 1 and len(one.chances[0]) == 256 and one.products_of_row == pytest.approx(8)
    assert one.read_bytes(64) < experts(ExpertLoads(), Mesh()).read_bytes(64), "fewer are chosen at all"
    assert rank_parts(LLAMA_8B, Mesh(), Formats(), SKEWED) == rank_parts(LLAMA_8B, Mesh(), Formats())


@pytest.mark.parametrize(("text", "message"), [
    ("zipf:much", "an exponent from 0 to 4"), ("zipf:-1", "an exponent from 0 to 4"), ("zipf:nan", "an exponent"),
    ("even odd", "is no file"), ("[1, 2", "is no JSON"), ("{}", "layer 0"), ("[]", "layer 0"), ("[0, 0]", "not all 0"),
    ("[1, -2]", "numbers from 0 on"), ("[1, true]", "numbers from 0 on"), ("[[1, 2], [1]]", "layer 1"),
    ("[[1, 2], 3]", "layer 1"),
    (f"[1, {'1' * 400}]", "the load of expert 1 is an integer of 1326 bits, and the most is 1e.300"),
    ("[1e308, 1e308, 1, 1]", "the load of expert 0 is 1e.308"), ("[1, Infinity]", "the load of expert 1 is inf"),
])  # fmt: skip
def test_loads_that_cannot_be(tmp_path: pathlib.Path, text: str, message: str) -> None:
    if text[0] in "[{":
        (tmp_path / "loads.json").write_text(text)
        text = str(tmp_path / "loads.json")
    with pytest.raises(ConfigError, match=message):
        read_loads(text)


def test_a_file_of_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "loads.json").write_text(json.dumps([[1] * 8, [2] * 8]))
    loads = read_loads(str(tmp_path / "loads.json"), 4)
    assert (len(loads.layers), loads.n_redundant) == (2, 4) and rank_parts(MIXTRAL, Mesh(tp=4, ep=4), Formats(), loads)
    with pytest.raises(ConfigError, match="has 8 experts a layer, and the model 256"):
        experts(loads)


def test_one_rank_reads_what_a_typical_layer_does() -> None:
    """Not the first one's, which has one expert for all here."""
    even, skewed = (5.0,) * 8, (9.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 1.0)
    found = spread(ExpertLoads(layers=((9.0, 9.0, 0, 0, 0, 0, 0, 0), even, even, skewed, even)), 8, 2.0, 1)
    assert found.ranks == (tuple(chosen(skewed, 2.0)),) and found.imbalance == 1
