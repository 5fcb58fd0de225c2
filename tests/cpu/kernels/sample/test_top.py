"""The most probable tokens in an order that depends on nothing but the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute.sample.logprobs import logprobs, packed_logprobs, prompt_logprobs, token_logprobs
from quire.core.logprobs import PackedLogprobs
from quire.kernels.sample import lines, reference
from quire.kernels.sample.top import top


def sorted_whole(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By sorting the whole row in Python."""
    ids = [sorted(range(len(row)), key=lambda token: (-row[token], token))[:k] for row in logits.tolist()]
    found = torch.tensor(ids, dtype=torch.int64).reshape(len(logits), k)
    return logits.gather(1, found), found


def check(logits: torch.Tensor, k: int) -> None:
    values, ids = top(logits, k)
    expected_values, expected_ids = sorted_whole(logits, k)
    assert torch.equal(ids, expected_ids) and torch.equal(values, expected_values)


@settings(max_examples=150)
@given(data=st.data(), width=st.integers(1, 400), n_rows=st.integers(1, 3))
def test_equals_sorting_with_ties(data: st.DataObject, width: int, n_rows: int) -> None:
    """Logits of few values, so that ties stand across every border."""
    values = data.draw(st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, 3e38, -torch.inf]), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = torch.from_numpy(rng.choice(np.array(values, np.float32), (n_rows, width)))
    check(logits, data.draw(st.integers(0, width)))


@pytest.mark.parametrize("width", [1, 7, 8, 9, 127, 128, 1000, 4099])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 20, 1000])
def test_equals_sorting(width: int, k: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for logits in (torch.randn(3, width, generator=generator) * 4, torch.zeros(3, width)):
        check(logits, min(k, width))
        check(logits.bfloat16().float(), min(k, width))
        check(logits.t().contiguous().t() if width > 1 else logits, min(k, width))


def test_non_finite_rows_harm_nobody() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    quiet = top(logits, 9)[1]
    logits[1] = torch.nan
    logits[2, 77] = torch.inf
    ids = top(logits, 9)[1]
    assert torch.equal(ids[0], quiet[0]) and ids[2, 0] == 77 and ((ids >= 0) & (ids < 500)).all()


def test_lines_do_not_depend_on_what_neighbours_ask_for() -> None:
    """The 5th and 6th most probable tokens are level; a neighbour wants 1 to 20 entries."""
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(1, 3000, generator=generator).bfloat16().float()
    fifth = row.sort(descending=True).values[0, 4]
    row[0, [11, 700, 701, 2999]] = fifth
    targets = torch.tensor([7], dtype=torch.int32)
    alone = token_logprobs(*parts(logprobs(row, targets, np.arange(1), np.array([5]))))[0]
    assert alone.top_logprobs == sorted(alone.top_logprobs, reverse=True) and 11 in alone.top_ids
    for n_neighbour in range(1, 21):
        for place in (0, 1):
            logits = torch.randn(3, 3000, generator=generator).bfloat16().float()
            logits[place] = row
            n_top = np.full(3, n_neighbour)
            n_top[place] = 5
            found = token_logprobs(*parts(logprobs(logits, targets.expand(3), np.arange(3), n_top)))
            assert found[place] == alone
    more = token_logprobs(*parts(prompt_logprobs(row, targets, 20)))[0]
    assert more.top_ids[:5] == alone.top_ids and more.top_logprobs[:5] == alone.top_logprobs


def test_packed_rows_are_those_of_plain_values() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    targets = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    found = logprobs(logits, targets, np.array([3, 5, 6, 9]), np.array([5, 0, 2, 5]))
    plain = token_logprobs(*parts(found))
    by_row = packed_logprobs(found.rows, *parts(found))
    assert list(by_row) == [3, 5, 6, 9] and [one.rows() for one in by_row.values()] == [[one] for one in plain]
    packed = list(by_row.values())
    assert PackedLogprobs.join([packed[0], packed[3]]).rows() == [plain[0], plain[3]]
    with pytest.raises(ValueError, match=r"rows of \[2, 5\]"):
        PackedLogprobs.join(packed[2:])
    few = packed_logprobs(found.rows, np.array([5, -1, 2, -1]), found.cells)
    assert few == {3: packed[0], 6: packed[2]}, "-1: nobody asked"


@pytest.mark.parametrize("width", [1, 9, 1000, 40_000])
@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_lines_equal_the_oracle(width: int, k: int) -> None:
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(width)) * 4
    logits[1] = logits[1].round()
    logits[2, ::2] = -torch.inf
    logits[2, width - 1] = 1.5
    targets = torch.tensor([0, width - 1, width - 1, width // 2, width // 3, 0], dtype=torch.int32)
    found, expected = lines(logits, targets, min(k, width)), reference.lines(logits, targets, min(k, width))
    for ours, theirs in zip(halves(found), halves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
    with pytest.raises(ValueError, match=f"at most {width}"):
        lines(logits, targets, width + 1)


def halves(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and ids, and log-probabilities."""
    return cells[..., 0], cells.view(torch.float32)[..., 1]


def parts(found: object) -> tuple[np.ndarray, torch.Tensor]:
    return found.n_top, found.cells  # type: ignore[attr-defined]
