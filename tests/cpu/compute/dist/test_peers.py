"""Which way a sum over GPUs goes, and that ranks agree on it; the memory and NCCL are stand-ins."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from quire.compute.device import cuda
from quire.compute.dist import peers
from quire.compute.dist.added import RankSum
from quire.compute.dist.comm import Reduction, SoloComm
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.core.errors import EngineError
from quire.kernels.reduce.hopper import PeerMemory

CPU = torch.device("cpu")


class Nccl(SoloComm):
    """Of some ranks; the other ones have nothing, or something against shared memory from a question on."""

    rank, size, n_calls = 0, 2, 0

    def __init__(self, against: int = 99, size: int = 2) -> None:
        self.asked: list[str] = []
        self.size = size
        self._against = against

    def join(self) -> None: ...

    def all_within(self, limit_s: float) -> bool:
        self.asked.append("all")
        return True

    def abort(self) -> None:
        self.asked.append("abort")

    def close(self) -> None:
        self.asked.append("close")

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = Reduction.SUM) -> torch.Tensor:
        self.asked.append(reduction.value)
        return x.mul_(0) if reduction is Reduction.MIN and self.asked.count("min") > self._against else x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x] * self.size)


class Memory(PeerMemory):
    """What would be launched."""

    def __init__(self, rank: int, size: int, *most: int) -> None:
        self.size, self._most, self.ways, self.n_bytes, self.handle = size, most, list[Any](), 0, bytes(64)
        self.is_closed, self.faults, self.order = False, list[tuple[int, int]](), list[str]()

    def map(self, handles: Any) -> None:
        assert list(handles) == [self.handle] * self.size

    def reduce(self, x: Any, residual: Any = None, norm: Any = None, **options: Any) -> Any:
        self.ways.append((options["two_shots"], residual is not None, norm is not None))
        return norm and torch.empty_like(x)

    def places(self, *, to_all: bool) -> Any:
        return to_all

    def most_sent_rows(self, row_bytes: int, *, to_all: bool) -> int:
        return 1024 if to_all else 4096

    def reduce_sent(self, residual: Any, norm: Any, normed: Any, *, to_all: bool, timeout_s: Any = None) -> None:
        self.ways.append(("summed", len(residual), to_all))
        residual.add_(1)
        if normed is not None:
            normed.copy_(residual)

    @property
    def lost(self) -> tuple[int, int] | None:
        return self.faults[0] if self.faults else None

    def unmap(self) -> None:
        self.order.append("unmap")

    def give_up(self) -> None:
        self.order.append("give up")

    def close(self) -> None:
        self.order.append("free")
        self.is_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    found: list[Memory] = []

    def make(*given: int) -> Memory:
        found.append(Memory(*given))
        return found[-1]

    monkeypatch.setattr(peers.hopper, "obstacle", lambda size: None)
    monkeypatch.setattr(peers, "PeerMemory", make)
    return found


@pytest.mark.parametrize(("size", "one_shot"), [(2, 4 << 20), (4, 256 << 10), (8, 73 << 10)])
def test_size_and_type_choose(size: int, one_shot: int, made: list[Memory]) -> None:
    nccl = Nccl(size=size)
    comm = PeerComm(nccl, CPU)
    early = torch.ones(8)
    comm.all_reduce(early)
    comm.join()
    (memory,), longest = made, peers.LONGEST_BYTES
    for n_bytes in (32, one_shot, min(one_shot + 1024, longest), longest + 32):
        comm.all_reduce(torch.ones(n_bytes // 4))
    assert [two for two, *_ in memory.ways] == [False, False, True, True] and nccl.asked.count("sum") == 1
    for x in (torch.ones(7), torch.ones(4, dtype=torch.int64), torch.ones(0)):
        comm.all_reduce(x)
    comm.all_reduce(torch.ones(8), Reduction.MAX)
    assert len(memory.ways) == 4 and nccl.asked.count("sum") == 4 and nccl.asked[-1] == "max"
    assert comm.n_calls == 9
    comm.close()
    assert memory.is_closed


@pytest.mark.parametrize(
    ("n_rows", "h", "parts"),
    [(65, 512, [65]), (65, 4096, [65]), (4096, 4096, [4096]), (9000, 4096, [3072, 3072, 2856])],
)
def test_products_send_their_terms_in_parts(
    n_rows: int, h: int, parts: list[int], made: list[Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is summed before the next is sent; all ranks cut alike. What no kernel sends is stored and summed."""
    reason: list[str] = []

    def send(product: Any, x: torch.Tensor, w: Any, bias: Any, places: Any) -> None:
        made[0].ways.append(("sent", len(x), places))

    monkeypatch.setattr(peers.sent, "prepare", lambda *given: reason[0] if reason else object())
    monkeypatch.setattr(peers.sent, "send", send)
    comm = PeerComm(Nccl(size=4), CPU)
    assert comm.sends_to == 0
    comm.join()
    assert comm.sends_to == 4
    y, w, x, norm = torch.ones(n_rows, 16), torch.ones(h, 16), torch.zeros(n_rows, h), (torch.ones(h), 1e-5)
    normed = RankSum(comm).add_product(y, w, None, x, norm)
    expected = [(what, n, h == 512) for n in parts for what in ("sent", "summed")]
    assert made[0].ways == expected and comm.n_calls == len(parts)
    assert x.eq(1).all() and normed is not None and normed.eq(1).all()
    assert RankSum(comm).add_product(y, w, None, x) is None
    reason.append("none")
    RankSum(comm).add_product(y, w, None, x, norm)
    assert made[0].ways[-1] == (h == 4096, True, True)


def test_what_does_not_fit_one_launch_is_several(made: list[Memory]) -> None:
    comm, weight = PeerComm(Nccl(), CPU), torch.full((6,), 2.0)
    comm.join()
    x, z = torch.ones(4, 8), torch.ones(4, 8)
    assert RankSum(comm).add(z, x) is None and RankSum(comm).add(z, x, (torch.ones(8), 1e-5)) is not None
    assert made[0].ways == [(False, True, False), (False, True, True)]
    x, z = torch.ones(2, 6), torch.ones(2, 6)  # 16 bytes divide the message, not a row
    normed = RankSum(comm).add(z, x, (weight, 0.0))
    assert x.eq(2).all() and normed is not None and torch.allclose(normed, weight.expand(2, 6))
    assert made[0].ways[2:] == [(False, False, False)], "the sum alone still goes there"


@pytest.mark.parametrize("against", [0, 1, 2])
def test_one_rank_that_cannot_is_enough(against: int, made: list[Memory]) -> None:
    comm = PeerComm(Nccl(against), CPU)
    comm.join()
    assert all(memory.is_closed for memory in made) and len(made) == (against > 0)
    comm.all_reduce(torch.ones(8))
    assert not any(memory.ways for memory in made)


def test_the_reason_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peers.hopper, "obstacle", lambda size: "there is no link")
    comm = PeerComm(Nccl(), CPU)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        comm.join()
        monkeypatch.setenv("QUIRE_PEER_MEMORY", "0")
        comm.join()
    assert "there is no link" in caplog.text and "QUIRE_PEER_MEMORY=0" in caplog.text


def test_nobody_sees_what_was_not_waited_for(made: list[Memory]) -> None:
    class Event:
        def synchronize(self) -> None: ...
        def query(self) -> bool:
            return True

    comm = PeerComm(Nccl(), CPU, first=4)
    comm.check()
    comm.join()
    arriving = cuda._Arriving([torch.ones(1)], Event(), [comm.check])  # type: ignore[arg-type]
    assert arriving.wait()[0].item() == 1
    made[0].faults.append((1, 7))
    with pytest.raises(EngineError, match="rank 4 has waited in vain for rank 5 in sum 7"):
        arriving.wait()


def test_what_never_comes_is_not_waited_for_once_a_check_says_so() -> None:
    class Event:
        """Of a kernel that waits for a rank that is gone."""

        n_looks = 0

        def synchronize(self) -> None:
            pytest.fail("this does not return")

        def query(self) -> bool:
            self.n_looks += 1
            return False

    def check() -> None:
        if event.n_looks > 3:
            raise EngineError("rank 1 is gone")

    event = Event()
    with pytest.raises(EngineError, match="rank 1 is gone"):
        cuda._Arriving([torch.ones(1)], event, [check], is_watched=True).wait()  # type: ignore[arg-type]


def test_memory_is_let_go_of_by_all_before_it_is_freed(made: list[Memory]) -> None:
    nccl = Nccl()
    comm = PeerComm(nccl, CPU)
    comm.join()
    (memory,), found = made, list[str]()
    memory.order = nccl.asked = found
    comm.close()
    assert found == ["unmap", "all", "free", "close"]


def test_without_the_others_nobody_is_waited_for(made: list[Memory]) -> None:
    nccl = Nccl()
    comm = PeerComm(nccl, CPU)
    comm.join()
    (memory,), found = made, list[str]()
    memory.order = nccl.asked = found
    comm.abort()
    comm.close()
    assert found == ["give up", "abort", "unmap", "free", "close"]


def test_nccl_groups_are_left_or_aborted() -> None:
    class Group:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def allreduce(self, tensors: list[torch.Tensor]) -> Group:
            return self

        def is_completed(self) -> bool:
            return False

        def abort(self) -> None:
            self.calls.append("abort")

        def shutdown(self) -> None:
            self.calls.append("shutdown")

    groups = [Group() for _ in range(4)]
    left, aborted, late, unmet = (NcclComm(0, 2, "at", CPU) for _ in range(4))
    for comm, group in zip((left, aborted, late), groups, strict=False):
        comm.__dict__["_group"] = group
    aborted.abort()
    assert not late.all_within(0.01), "the other one does not come"
    for comm in (left, aborted, late, unmet):
        comm.close()
        comm.close()
    assert [group.calls for group in groups] == [["shutdown"], ["abort"], ["abort"], []]
