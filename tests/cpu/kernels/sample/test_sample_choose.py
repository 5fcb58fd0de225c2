"""The choice of a token: the random numbers, the kept set against transformers, and the CPU path against the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.kernels.sample import (
    EMPTY,
    FINE,
    N_CONTROLS,
    NON_FINITE,
    Choice,
    Draw,
    TokenMasks,
    choose,
    choose_by,
    reference,
)
from quire.kernels.sample.draw import keyed_bits, keyed_uniform, seed_key

FEATURES = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "hot": {"temperature": 100.0},
    "cold": {"temperature": 1e-5},
    "top_k": {"top_k": 7},
    "top_k_large": {"top_k": 900},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "all": {"min_p": 0.01, "top_k": 40, "top_p": 0.9},
}


def make_draw(n_rows: int, seed: int = 0, **values: float) -> Draw:
    """Equal controls in all rows; the random numbers come from the seed."""
    fields = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    columns = {name: np.full(n_rows, value, kinds[name]) for name, value in fields.items()}
    return Draw(uniform=np.random.default_rng(seed).random(n_rows), **columns)


def joined(draws: list[Draw]) -> Draw:
    names = [field.name for field in dataclasses.fields(Draw)]
    return Draw(**{name: np.concatenate([getattr(draw, name) for draw in draws]) for name in names})


def oracle(logits: torch.Tensor, draw: Draw) -> Choice:
    choice = Choice(torch.zeros(len(draw), dtype=torch.int32), torch.zeros(len(draw), dtype=torch.uint8))
    reference.choose_by(logits, torch.from_numpy(draw.controls()), choice)
    return choice


def assert_agrees(choice: Choice, logits: torch.Tensor, draw: Draw) -> None:
    """Tokens equal the oracle's, or the random number lies on a step of the oracle's cumulative distribution."""
    expected, controls = oracle(logits, draw), draw.controls()
    assert choice.status.tolist() == expected.status.tolist()
    for i in np.flatnonzero((choice.token_ids != expected.token_ids).numpy()):
        probabilities = reference.distribution(logits[i], controls[:, i])
        assert probabilities[choice.token_ids[i]] > 0, f"row {i}: token outside the kept set"
        steps = torch.cat([torch.zeros(1), probabilities.cumsum(0)])
        between = sorted([int(choice.token_ids[i]), int(expected.token_ids[i])])
        distance = (steps[between[0] + 1 : between[1] + 1] - float(draw.uniform[i])).abs().max()
        assert distance < reference.TOLERANCE, f"row {i}: {between}, {float(distance)}"


def splitmix(x: int) -> int:
    """Written from the paper, in integers of any size."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def test_random_bits_are_the_same_integers_everywhere() -> None:
    golden = 0x9E3779B97F4A7C15
    seeds = np.array([0, 1, 2, 2**62, 2**63 - 1, 12345, 77])
    positions = np.array([0, 1, 131071, 5, 2**31, 999, 3])
    expected = [
        splitmix((splitmix((s + golden) % 2**64) + (p + 1) * golden) % 2**64) >> 11
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert keyed_bits(seed_key(seeds), positions).tolist() == expected
    tensors = torch.from_numpy(seeds), torch.from_numpy(positions)
    assert keyed_bits(seed_key(tensors[0]), tensors[1]).tolist() == expected
    assert keyed_uniform(seed_key(seeds), positions).tolist() == [bits / 2**53 for bits in expected]


@pytest.mark.parametrize("along", ["seed", "position"])
def test_random_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    counter, fixed = np.arange(20_000), np.full(20_000, 42)
    seeds, positions = (counter, fixed) if along == "seed" else (fixed, counter)
    numbers = keyed_uniform(seed_key(seeds), positions)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("seed", range(30))
def test_kept_set_and_probabilities_equal_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.randn(1, int(rng.integers(2, 400)), generator=torch.Generator().manual_seed(seed)) * 3
    values = {
        "temperature": float(rng.uniform(0.1, 3)),
        "min_p": float(rng.choice([0, 0.02, 0.3, 1.0])),
        "top_k": int(rng.choice([0, 1, 5, 50, 1000])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5, 0.01])),
    }
    chain = LogitsProcessorList([TemperatureLogitsWarper(values["temperature"])])
    if values["min_p"]:
        chain.append(MinPLogitsWarper(values["min_p"]))
    if values["top_k"]:
        chain.append(TopKLogitsWarper(values["top_k"]))
    if values["top_p"] < 1:
        chain.append(TopPLogitsWarper(values["top_p"]))
    expected = chain(torch.zeros(1, 1, dtype=torch.long), logits.double())[0].softmax(-1)
    ours = reference.distribution(logits[0], make_draw(1, **values).controls()[:, 0])
    assert torch.equal(ours > 0, expected > 0), values
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("width", [1, 2, 127, 128, 1000, 5000])
@pytest.mark.parametrize("feature", FEATURES)
def test_cpu_path_equals_the_oracle(feature: str, width: int) -> None:
    logits = torch.randn(40, width, generator=torch.Generator().manual_seed(width)) * 4
    draw = make_draw(40, seed=width, **FEATURES[feature])
    assert_agrees(choose(logits, draw), logits, draw)


@pytest.mark.parametrize("feature", ["temperature", "all"])
def test_frequencies_fit_the_distribution(feature: str) -> None:
    n_draws, width = 10_000, 300
    row = torch.randn(width, generator=torch.Generator().manual_seed(1)) * 2
    draw = make_draw(n_draws, **FEATURES[feature])
    draw.uniform = keyed_uniform(seed_key(np.full(n_draws, 7)), np.arange(n_draws))
    counts = torch.bincount(choose(row.expand(n_draws, -1), draw).token_ids, minlength=width).double()
    probabilities = reference.distribution(row, draw.controls()[:, 0])
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * n_draws > 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([probabilities[common], probabilities[~common].sum()[None]]) * n_draws
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_ends_of_the_unit_interval_choose_tokens_with_weight() -> None:
    logits = torch.full((200, 600), -torch.inf)
    logits[:, 100:301] = torch.randn(200, 201, generator=torch.Generator().manual_seed(2))
    draw = make_draw(200)
    for uniform_number, token in ((0.0, 100), (2.0**-53, 100), (1 - 2.0**-53, 300)):
        draw.uniform = np.full(200, uniform_number)
        assert choose(logits, draw).token_ids.tolist() == [token] * 200


def test_the_nucleus_ends_where_its_share_is_reached_exactly() -> None:
    half = -0.6931472  # exp gives exactly 0.5 in float32
    logits = torch.tensor([[0.0, half, half]])
    draw = make_draw(50, temperature=1.0, top_p=0.5)
    assert set(choose(logits.expand(50, -1), draw).token_ids.tolist()) == {0}


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 500)
    logits[0, [77, 300]] = 1.0
    logits[1] = -5.0
    logits[2, 499] = 0.5
    assert choose(logits, make_draw(3, temperature=0.0)).token_ids.tolist() == [77, 0, 499]


def test_equal_logits_at_the_border_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    kept_by_k = reference.distribution(logits[0], make_draw(1, top_k=2).controls()[:, 0])
    kept_by_p = reference.distribution(logits[0], make_draw(1, temperature=1.0, top_p=0.6).controls()[:, 0])
    assert (kept_by_k > 0).tolist() == (kept_by_p > 0).tolist() == [False, True, True, True, False, True]
    for values in ({"top_k": 2}, {"temperature": 1.0, "top_p": 0.6}):
        draw = make_draw(200, **values)
        assert set(choose(logits.expand(200, -1), draw).token_ids.tolist()) == {1, 2, 3, 5}


def test_bad_rows_are_flagged_and_their_neighbours_are_not_touched() -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(3))
    clean = logits.clone()
    bad = {2: (torch.nan, NON_FINITE), 5: (torch.inf, NON_FINITE), 8: (-torch.inf, EMPTY)}
    for row, (value, _) in bad.items():
        logits[row, 650] = value
    logits[8] = -torch.inf
    for values in FEATURES.values():
        draw = make_draw(12, **values)
        choice, quiet = choose(logits, draw), choose(clean, draw)
        for row in range(12):
            status = bad[row][1] if row in bad else FINE
            assert int(choice.status[row]) == status
            assert int(choice.token_ids[row]) == (0 if row in bad else int(quiet.token_ids[row]))


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30, 3e38])
@pytest.mark.parametrize("feature", FEATURES)
def test_extreme_logits_never_fail(feature: str, scale: float) -> None:
    logits = (torch.rand(20, 300, generator=torch.Generator().manual_seed(4)) * 2 - 1) * scale
    draw = make_draw(20, **FEATURES[feature])
    choice = choose(logits, draw)
    assert choice.status.sum() == 0
    if scale > 1e20:
        assert torch.equal(choice.token_ids, logits.argmax(-1).int())


@pytest.mark.parametrize("width", [700, 40_000])
def test_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    features = list(FEATURES.values())
    n_rows = 64
    logits = torch.randn(n_rows, width, generator=torch.Generator().manual_seed(5))
    logits = (logits * 8).round() / 8  # many ties
    draw = joined([make_draw(1, seed=i, **features[i % len(features)]) for i in range(n_rows)])
    together = choose(logits, draw).token_ids
    alone = [int(choose(logits[i : i + 1].clone(), draw.take(np.array([i]))).token_ids) for i in range(n_rows)]
    assert together.tolist() == alone
    order = np.random.default_rng(6).permutation(n_rows)
    assert choose(logits[order], draw.take(order)).token_ids.tolist() == together[order].tolist()


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="float32"):
        choose(torch.zeros(2, 4, dtype=torch.float16), make_draw(2))
    with pytest.raises(ValueError, match="one draw a row"):
        choose(torch.zeros(2, 4), make_draw(3))
    assert choose(torch.zeros(0, 4), make_draw(0)).token_ids.shape == (0,)
    with pytest.raises(ValueError, match="float64"):
        choose_by(torch.zeros(2, 4), torch.zeros(5, 2))


def test_controls_may_be_a_slice_of_a_wider_buffer_and_the_result_goes_where_it_is_wanted() -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(7)) * 3
    draw = joined([make_draw(1, seed=i, **values) for i, values in enumerate(list(FEATURES.values())[:6])])
    wide = torch.full((N_CONTROLS, 16), torch.nan, dtype=torch.float64)
    wide[:, 4:10] = torch.from_numpy(draw.controls())
    out = Choice(torch.full((6,), -1, dtype=torch.int32), torch.full((6,), 9, dtype=torch.uint8))
    assert choose_by(logits, wide[:, 4:10], out) is out
    assert out.token_ids.tolist() == choose(logits, draw).token_ids.tolist()
    assert out.status.tolist() == [FINE] * 6


def test_controls_of_greedy_rows_are_neutral() -> None:
    draw = make_draw(2, top_k=5, top_p=0.5, min_p=0.1)
    draw.temperature[0] = 0
    controls = draw.controls()
    assert controls[:, 0].tolist() == [0, 0, -np.inf, 0, 1]
    assert controls[1:, 1].tolist() == pytest.approx([1 / 0.7, 0.7 * np.log(0.1), 5, 0.5], rel=1e-6)


@pytest.mark.parametrize("lines", [[0, 1, 2, 3], [-1, 1, -1, 0], [-1, -1, 0, -1]])
@pytest.mark.parametrize(("width", "n_words"), [(64, 2), (70, 3), (70, 2)])
def test_masks_leave_what_they_allow(lines: list[int], width: int, n_words: int) -> None:
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (4, n_words), np.int64).astype(np.int32))
    masks = TokenMasks(torch.tensor(lines, dtype=torch.int32), bits)
    logits, draw = torch.randn(4, width), make_draw(4, seed=1)
    logits[2, 5] = torch.nan
    expected, oracle = logits.clone(), Choice(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.uint8))
    reference.choose_by(expected, torch.from_numpy(draw.controls()), oracle, masks)
    choice = choose_by(logits, torch.from_numpy(draw.controls()), masks=masks)
    assert torch.equal(logits.nan_to_num(9.0), expected.nan_to_num(9.0)) and expected.isinf().any()
    assert choice.token_ids.tolist() == oracle.token_ids.tolist() and choice.status.tolist() == [0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"\[4\] and contiguous lines of words are needed"):
        choose_by(logits, torch.from_numpy(draw.controls()), masks=TokenMasks(masks.lines[:3], bits))
