"""Shares of matrices: every number of the whole is in one of them, and what does not divide is refused by name."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.kv import kv_layout
from quire.config.layers import NormSpec
from quire.config.model import read_arch
from quire.config.parameters import Cut, Matrix, NormTable, layer_parameters
from quire.config.shares import Ranges, n_rows_of, share, share_arch, share_layer, share_norm, share_tensor
from quire.core.errors import ConfigError
from quire.planner.memory import MemoryEquation

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"
QKV = Matrix(n_in=96, parts=(("q", 256), ("k", 128), ("v", 128)), bias=True, cut=Cut.COLUMN, unit=32)
OUT = Matrix(n_in=256, parts=(("o", 96),), bias=True, cut=Cut.ROW, unit=32)
REPEATED = Matrix(n_in=96, parts=(("q", 256), ("k", 64), ("v", 64)), cut=Cut.COLUMN, unit=32, n_repeated=2)
NORMAL = Matrix(n_in=96, parts=(("p", 10), ("r", 7)), bias=True)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_columns_of_each_part(n_ranks: int) -> None:
    shares = [share(QKV, rank, n_ranks) for rank in range(n_ranks)]
    for part, (name, rows) in enumerate(QKV.parts):
        ranges = [(first, first + number) for one in shares for first, number in one.rows[part]]
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
        assert one.matrix == NORMAL and one.rows == (((0, 10),), ((0, 7),)) and one.first_column == 0


def test_keys_are_repeated_where_there_are_fewer_than_ranks() -> None:
    shares = [share(REPEATED, rank, 8) for rank in range(8)]
    assert [one.rows for one in shares] == [
        tuple(((first, 32),) for first in (32 * r, r // 4 * 32, r // 4 * 32)) for r in range(8)
    ]
    assert {one.matrix.parts for one in shares} == {(("q", 32), ("k", 32), ("v", 32))}
    with pytest.raises(ConfigError, match=r"^k has 64 outputs in units of 32, which 3 ranks"):
        share(msgspec.structs.replace(REPEATED, parts=(("q", 288), ("k", 64), ("v", 64))), 0, 3)


@given(st.integers(1, 300), st.integers(2, 9))
def test_a_vocabulary_is_cut_anywhere(n_rows: int, n_ranks: int) -> None:
    whole = Matrix(n_in=4, parts=(("e", n_rows),), bias=True, cut=Cut.VOCABULARY)
    most = -(-n_rows // n_ranks)
    if most * (n_ranks - 1) >= n_rows:
        with pytest.raises(ConfigError, match=f"e has {n_rows} rows, of which the last of {n_ranks} ranks"):
            share(whole, 0, n_ranks)
        return
    shares = [share(whole, rank, n_ranks) for rank in range(n_ranks)]
    rows = [row for one in shares for first, number in one.rows[0] for row in range(first, first + number)]
    assert rows == list(range(n_rows)) and all(one.matrix.n_out == most for one in shares[:-1])


def test_norms_of_heads() -> None:
    eps = NormSpec(eps=1e-5)
    heads = NormTable(name="n", shape=(4, 8), spec=eps, is_apart=True, cut=Cut.COLUMN)
    assert [share_norm(heads, rank, 2).parts for rank in range(2)] == [("n.0", "n.1"), ("n.2", "n.3")]
    keys = NormTable(name="k", shape=(2, 8), spec=eps, cut=Cut.COLUMN, is_repeated=True)
    assert [(share_norm(keys, rank, 4).first_row, share_norm(keys, rank, 4).shape) for rank in range(4)] == [
        (0, (1, 8)), (0, (1, 8)), (1, (1, 8)), (1, (1, 8)),
    ]  # fmt: skip
    all_heads = NormTable(name="w", shape=(8,), spec=eps)
    assert share_norm(all_heads, 1, 2) is all_heads
    with pytest.raises(ConfigError, match="n has 4 heads, which 3 ranks"):
        share_norm(heads, 0, 3)


@pytest.mark.parametrize("n_ranks", [1, 2, 4, 8, 16])
def test_a_rank_is_a_model_of_its_own(n_ranks: int) -> None:
    """Its description has the sizes of the shares of its matrices, and its memory follows from it."""
    whole = read_arch(SHAPES / "qwen3-0.6b")
    own = share_arch(whole, n_ranks - 1, n_ranks)

    def sizes(matrices: Iterable[Matrix]) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
        return [(one.n_in, one.parts) for one in matrices]

    own_parameters, parameters = (layer_parameters(arch.layers[0], arch.hidden_size, 0) for arch in (own, whole))
    cut = [share(one, n_ranks - 1, n_ranks).matrix for one in parameters.matrices]
    assert sizes(own_parameters.matrices) == sizes(cut)
    limits = {"page_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    n_times = min(n_ranks, whole.n_kv_heads)
    assert kv_layout(own).numbers * n_times == kv_layout(whole).numbers
    alone, part = (MemoryEquation(arch=arch, weights_bytes=0, **limits) for arch in (whole, own))
    assert part.page_bytes * n_times == alone.page_bytes and part.logits_bytes == alone.logits_bytes
    assert (part.workspace_bytes < alone.workspace_bytes) == (n_ranks > 1)


def test_what_a_model_cannot_share() -> None:
    whole = read_arch(SHAPES / "qwen3-0.6b")
    with pytest.raises(ConfigError, match="a feed-forward is 3072 wide, which 5 ranks cannot share"):
        share_arch(whole, 0, 5)
    with pytest.raises(ConfigError, match="attention has 16 query heads, which 3 ranks cannot share"):
        share_arch(whole, 0, 3)


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


class Whole:
    """A mixer that no ranks can share, and a part of whose name looks like a cure."""

    def share(self, rank: int, n_ranks: int) -> Whole:
        raise ConfigError(f"model.give: take 2.weight has no parts for {n_ranks} ranks", cure="use one rank")


def test_a_cure_is_no_part_of_what_was_wrong() -> None:
    arch = read_arch(SHAPES / "qwen3-0.6b")
    layer = msgspec.structs.replace(arch.layers[0], mixer=Whole())
    with pytest.raises(ConfigError) as caught:
        share_arch(msgspec.structs.replace(arch, layers=(layer,)), 0, 2)
    wrong = "model.give: take 2.weight has no parts for 2 ranks"
    assert caught.value.message == f"{wrong}: take one rank; no other number works"
    with pytest.raises(ConfigError) as inner:
        share_layer(layer, 0, 2)
    assert (inner.value.wrong, inner.value.message) == (wrong, f"{wrong}: use one rank")


@pytest.mark.parametrize("shape, said", [
    ("lfm2-1.2b", "a feed-forward is 8192 wide, which 3 ranks cannot share equally"),
    ("mamba2-2.7b", "Mamba-2 has 80 heads, which 3 ranks cannot share equally"),
    ("qwen3-next-80b-a3b", "the shared expert is 512 wide, which 3 ranks cannot share equally"),
    ("qwen3-0.6b", "attention has 16 query heads, which 3 ranks cannot share equally"),
])  # fmt: skip
def test_what_would_do_instead_is_said(shape: str, said: str) -> None:
    arch = read_arch(SHAPES / shape)
    with pytest.raises(ConfigError, match=rf"{said}: take another number of ranks \(2, 4[\d, ]* work\)$") as caught:
        share_arch(arch, 0, 3)
    numbers = re.findall(r"\d+", caught.value.message.rpartition("(")[2])
    for number in map(int, numbers):
        assert share_arch(arch, number - 1, number).n_layers == arch.n_layers


@pytest.mark.parametrize("shape", ["lfm2-1.2b", "mamba2-2.7b", "qwen3-next-80b-a3b", "olmoe-1b-7b"])
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_parts_of_every_mixer_are_all_of_it(shape: str, n_ranks: int) -> None:
    """Each row is on as many ranks as have its unit, and a rank's description has the sizes of its parts."""
    whole = read_arch(SHAPES / shape)
    owns = [share_arch(whole, rank, n_ranks) for rank in range(n_ranks)]
    for layer in {spec: number for number, spec in enumerate(whole.layers)}.values():
        parameters, *parts = (layer_parameters(arch.layers[layer], arch.hidden_size, 0) for arch in (whole, *owns))
        for place, matrix in parameters.mixer.matrices.items():
            shares = [share(matrix, rank, n_ranks) for rank in range(n_ranks)]
            for mine, own in zip(shares, parts, strict=True):
                assert (mine.matrix.parts, mine.matrix.n_in) == (
                    own.mixer.matrices[place].parts, own.mixer.matrices[place].n_in,
                )  # fmt: skip
            for part, (_, n_rows) in enumerate(matrix.parts if matrix.cut is Cut.COLUMN else ()):
                assert_each_once([one.rows[part] for one in shares], n_rows)
        for place, tensor in parameters.mixer.tensors.items():
            found = [share_tensor(tensor, rank, n_ranks) for rank in range(n_ranks)]
            assert [one.shape for one, _ in found] == [own.mixer.tensors[place].shape for own in parts]
            assert_each_once([rows for _, rows in found], tensor.shape[0])
        for place, table in parameters.mixer.norms.items():
            assert {share_norm(table, rank, n_ranks).shape for rank in range(n_ranks)} == {
                own.mixer.norms[place].shape for own in parts
            }


def assert_each_once(ranges: list[Ranges], n_rows: int) -> None:
    """Or as often as others of its section."""
    counts = collections.Counter(
        row for own in ranges for first, number in own for row in range(first, first + number)
    )  # fmt: skip
    assert sorted(counts) == list(range(n_rows)) and sum(counts.values()) == len(ranges) * n_rows_of(ranges[0])
