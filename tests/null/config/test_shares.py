"""Shares of matrices: every number of the whole is in one of them, and what does not divide is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.parameters import Cut, Matrix
from quire.config.shares import share
from quire.core.errors import ConfigError

QKV = Matrix(n_in=96, parts=(("q", 256), ("k", 128), ("v", 128)), bias=True, cut=Cut.COLUMN, unit=32)
OUT = Matrix(n_in=256, parts=(("o", 96),), bias=True, cut=Cut.ROW, unit=32)
NORMAL = Matrix(n_in=96, parts=(("p", 10), ("r", 7)), bias=True)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_columns_of_each_part(n_ranks: int) -> None:
    shares = [share(QKV, rank, n_ranks) for rank in range(n_ranks)]
    for part, (name, rows) in enumerate(QKV.parts):
        ranges = [(one.first_rows[part], one.first_rows[part] + one.matrix.parts[part][1]) for one in shares]
        assert [row for start, end in ranges for row in range(start, end)] == list(range(rows)), name
    assert all(one.matrix.n_in == 96 and one.first_column == 0 and one.matrix.bias for one in shares)
    assert {one.matrix.cut for one in shares} == {QKV.cut if n_ranks == 1 else Cut.REPLICATED}


@pytest.mark.parametrize("n_ranks", [1, 2, 8])
def test_inputs_of_a_row_parallel_matrix(n_ranks: int) -> None:
    shares = [share(OUT, rank, n_ranks) for rank in range(n_ranks)]
    columns = [column for one in shares for column in range(one.first_column, one.first_column + one.matrix.n_in)]
    assert columns == list(range(256))
    assert [one.matrix.bias for one in shares] == [True, *[False] * (n_ranks - 1)], "it is added once"
    assert all(one.matrix.n_out == 96 for one in shares)


def test_what_is_not_cut_is_whole_everywhere() -> None:
    for rank in range(3):
        one = share(NORMAL, rank, 3)
        assert one.matrix == NORMAL and one.first_rows == (0, 0) and one.first_column == 0


def test_refusals_name_the_matrix() -> None:
    with pytest.raises(ConfigError, match=r"^q has 256 outputs in units of 32, which 3 ranks"):
        share(QKV, 0, 3)
    with pytest.raises(ConfigError, match=r"^k has 128 outputs in units of 32, which 8 ranks"):
        share(QKV, 0, 8)
    with pytest.raises(ConfigError, match=r"^o has 256 inputs .* the 64 of one rank of 4 .* 128"):
        share(OUT, 0, 4, column_step=128)
    with pytest.raises(ConfigError, match=r"^k has 128 outputs .* the 32 of one rank of 4 .* 64"):
        share(QKV, 0, 4, row_step=64)
    assert share(QKV, 0, 4, column_step=64).matrix.n_in == 96, "no cut goes through its groups"


SIZES = st.integers(1, 4)


@given(st.integers(1, 8), st.integers(1, 8), SIZES, SIZES, st.sampled_from([Cut.COLUMN, Cut.ROW]))
def test_all_shares_are_equal_or_refused(n_ranks: int, n_units: int, unit: int, step: int, cut: Cut) -> None:
    size = n_units * unit
    if cut is Cut.COLUMN:
        whole = Matrix(n_in=5, parts=(("a", size), ("b", size)), cut=cut, unit=unit)
    else:
        whole = Matrix(n_in=size, parts=(("a", 5),), cut=cut, unit=unit)
    fits = n_ranks == 1 or (n_units % n_ranks == 0 and size // n_ranks % step == 0)
    if not fits:
        with pytest.raises(ConfigError):
            share(whole, 0, n_ranks, row_step=step, column_step=step)
        return
    shares = [share(whole, rank, n_ranks, row_step=step, column_step=step) for rank in range(n_ranks)]
    assert {(one.matrix.n_in, one.matrix.parts) for one in shares} == {(shares[0].matrix.n_in, shares[0].matrix.parts)}
    numbers = sum(one.matrix.n_in * one.matrix.n_out for one in shares)
    assert numbers == whole.n_in * whole.n_out
