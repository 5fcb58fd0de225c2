"""Rows that go to experts of other ranks: both ways give what all experts in one place give, whatever each rank has.

Ranks are threads of this process, over gloo."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
from gloo_ranks import on_ranks

from quire.bench.shape import FOLDER
from quire.compute.dist.comm import SoloComm
from quire.compute.dist.exchange import Exchange
from quire.compute.dist.gloo import GlooComm
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.communication import exchange_transfers
from quire.planner.exchange import COUNTS_BYTES
from quire.planner.formats import Formats
from quire.planner.parts import rank_parts

HIDDEN, N_CHOSEN, N_HELD = 12, 3, 2


def rows_for(size: int, counts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each data-parallel rank: rows, experts, weights."""
    torch.manual_seed(3)
    n_experts = size * N_HELD
    return [
        (
            torch.randn(n, HIDDEN),
            torch.stack([torch.randperm(n_experts)[:N_CHOSEN] for _ in range(n)]).int()
            if n
            else torch.empty(0, N_CHOSEN, dtype=torch.int32),
            torch.rand(n, N_CHOSEN),
        )
        for n in counts
    ]


def products(matrices: torch.Tensor) -> Callable[..., torch.Tensor]:
    """matrices: [experts held, HIDDEN, HIDDEN]. Results are multiplied by the marks of rows."""

    def compute(x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        assert 1 <= len(x) <= 4 and expert_ids.is_contiguous() and weights.is_contiguous()
        each = torch.einsum("nkij,nj->nki", matrices[expert_ids.clamp(min=0).long()], x)
        return (each * torch.where(expert_ids < 0, 0.0, weights)[..., None]).sum(1) * marks[:, None]

    return compute


@pytest.mark.parametrize("counts_bytes, gathers", [(1 << 40, True), (0, False)])
@pytest.mark.parametrize("n_sharing, counts", [(1, [5, 3]), (1, [0, 7, 1]), (2, [5, 2]), (2, [0, 3]), (2, [1, 0])])
def test_both_ways_give_what_one_place_gives(
    n_sharing: int, counts: list[int], counts_bytes: int, gathers: bool, tmp_path: pathlib.Path
) -> None:
    size = n_sharing * len(counts)
    given = rows_for(size, counts)
    matrices = torch.randn(size * N_HELD, HIDDEN, HIDDEN)
    marks = [torch.randint(-3, 4, (n,), dtype=torch.int32) for n in counts]

    def work(comm: GlooComm) -> torch.Tensor:
        dp_rank, place = divmod(comm.rank, n_sharing)
        one = Exchange(comm, place, n_sharing, 4, counts_bytes)
        one.begin(counts)
        own = products(matrices[comm.rank * N_HELD : (comm.rank + 1) * N_HELD])
        x, expert_ids, weights = given[dp_rank]
        assert one.gathers(x, N_CHOSEN, N_HELD) == gathers
        given_once = x, expert_ids, weights, N_HELD, own, marks[dp_rank]
        y = one.run(*given_once)
        return one.run(*given_once) if torch.equal(y, y + 0) else y

    found = on_ranks(size, tmp_path, work)
    for dp_rank, (x, expert_ids, weights) in enumerate(given):
        y = sum(found[dp_rank * n_sharing : (dp_rank + 1) * n_sharing])  # as the ranks that share a layer do
        each = torch.einsum("nkij,nj->nki", matrices[expert_ids.long()].double(), x.double())
        expected = (each * weights.double()[..., None]).sum(1) * marks[dp_rank][:, None]
        torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_row_is_sent_once_to_a_rank(tmp_path: pathlib.Path) -> None:
    """However many of its experts are there."""
    expert_ids = torch.tensor([[0, 1, 2], [2, 3, 1]], dtype=torch.int32)

    def work(comm: GlooComm) -> list[list[int]]:
        seen: list[list[int]] = []

        def compute(x: torch.Tensor, own: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            seen.extend(own.tolist())
            return x

        one = Exchange(comm, 0, 1, 4, 0)
        one.begin([2, 0])
        n = 2 if comm.rank == 0 else 0
        y = one.run(torch.ones(n, HIDDEN), expert_ids[:n], torch.ones(n, N_CHOSEN), N_HELD, compute)
        assert y.eq(2).all(), "one sum from each of two ranks"
        return seen

    assert on_ranks(2, tmp_path, work) == [[[0, 1, -1], [-1, -1, 1]], [[-1, -1, 0], [0, 1, -1]]]


class Four(SoloComm):
    rank, size, n_calls = 1, 4, 0


@pytest.mark.parametrize("rows, n_chosen, gathers", [
    ([8, 8, 8, 8], 8, True),  # few bytes: telling one another how many come takes longer
    ([4096] * 4, 1, False),  # each row goes to one rank of four
    ([4096] * 4, 32, True),  # each goes to all
    ([16384, 0, 0, 0], 32, False),  # three ranks would send as many rows of nothing
])  # fmt: skip
def test_the_way_with_fewer_bytes_is_taken(rows: list[int], n_chosen: int, gathers: bool) -> None:
    one = Exchange(Four(), 0, 1, 64, COUNTS_BYTES)  # type: ignore[arg-type]
    one.begin(rows)
    assert one.gathers(torch.empty(rows[1], 2048, dtype=torch.bfloat16), n_chosen, 32) == gathers


def test_gloo_sums_what_it_scatters(tmp_path: pathlib.Path) -> None:
    def work(comm: GlooComm) -> list[float]:
        x = torch.arange(6, dtype=torch.bfloat16).view(3, 2) * (comm.rank + 1)
        return comm.reduce_scatter(x).tolist()

    assert on_ranks(3, tmp_path, work) == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]


class CountedComm(GlooComm):
    """Counts the bytes that its rank sends; a reduce-scatter of gloo's is an all-to-all."""

    n_bytes = 0

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.n_bytes += x.nbytes * (self.size - 1)
        return super().all_gather(x)

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        self.n_bytes += x[0].nbytes * (sum(sent) - sent[self.rank]) if len(x) else 0
        return super().all_to_all(x, sent, received)


@pytest.mark.parametrize("tp, rows", [(1, [16, 5, 0, 9]), (2, [16, 11]), (1, [300, 500, 420, 380]), (2, [800, 640])])
def test_the_planner_knows_how_many_bytes_are_sent(tp: int, rows: list[int], tmp_path: pathlib.Path) -> None:
    """Of a layer, in the mean of ranks: to the byte where rows are gathered, and within the luck of the draw where each
    goes to the ranks of its experts."""
    arch = read_arch(FOLDER / "mixtral-8x7b")
    n_ranks, n_experts, n_chosen = tp * len(rows), 8, 2
    mesh, torch_rng = Mesh(tp=tp, dp=len(rows), ep=n_ranks), torch.Generator().manual_seed(5)
    chosen = [torch.rand(n, n_experts, generator=torch_rng).argsort(1)[:, :n_chosen].int() for n in rows]

    def work(comm: GlooComm) -> tuple[int, bool]:
        assert isinstance(comm, CountedComm)
        dp_rank, place = divmod(comm.rank, tp)
        one = Exchange(comm, place, tp, 1 << 20)
        one.begin(rows)
        x = torch.zeros(rows[dp_rank], arch.hidden_size, dtype=torch.bfloat16)
        one.run(x, chosen[dp_rank], torch.ones(len(x), n_chosen), n_experts // n_ranks, lambda x, _, __: x)
        return comm.n_bytes, one.gathers(x, n_chosen, n_experts // n_ranks)

    found = on_ranks(n_ranks, tmp_path, work, CountedComm)
    parts = rank_parts(arch, mesh, Formats())
    transfers = exchange_transfers(parts, mesh, max(rows), sum(rows) / len(rows), 2)
    said = sum(one.n_times * one.n_bytes for one in transfers) / arch.n_layers
    gathers = max(rows) < 38
    assert {way for _, way in found} == {gathers}
    assert sum(n for n, _ in found) / n_ranks == pytest.approx(said, rel=1e-6 if gathers else 0.03)
