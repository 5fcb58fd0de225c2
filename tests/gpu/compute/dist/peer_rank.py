"""One rank of test_peers_cuda.py: a process with a GPU. Arguments: rank, ranks, meeting point."""

from __future__ import annotations

import logging
import sys
import threading
import time

import torch

from quire.compute.dist.added import RankSum
from quire.compute.dist.comm import Reduction
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.core.errors import EngineError
from quire.kernels.gemm.hopper import load
from quire.kernels.gemm.hopper_product import Build, n_processors_of
from quire.kernels.gemm.plan import ProductShape
from quire.kernels.gemm.wide import wide_plan
from quire.kernels.norm.reference import TOLERANCE
from quire.kernels.reduce import hopper, reference

SHAPES = [(1, 4096), (1, 8), (3, 1000), (17, 5120), (33, 8192), (64, 3584), (129, 4096), (2, 16384)]
SHAPES += [(250, 8192), (509, 8192), (1300, 8192)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ODD = [(torch.bfloat16, (5, 3)), (torch.float32, (1,)), (torch.bfloat16, (1, 4097)), (torch.int64, (9,))]
PRODUCTS = [(65, 4096, 1024), (128, 512, 256), (203, 8192, 2048), (256, 4096, 3584), (1000, 2560, 1024)]
PRODUCTS += [(5000, 8192, 512), (129, 4096, 1024), (131, 4096, 1024)]
N_REPLAYS = 1000
EPS = 1e-5


class Rank:
    def __init__(self, rank: int, size: int, meeting_point: str) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        torch.cuda.set_device(self.device)

        def comm(name: str, one_shot: int | None = None) -> PeerComm:
            nccl = NcclComm(rank, size, f"{meeting_point}-{name}", self.device, timeout_s=120)
            return PeerComm(nccl, self.device, one_shot, to_all=one_shot)

        self.default, self.ones, self.twos = comm("default"), comm("ones", 8 << 20), comm("twos", 0)
        for comm in (self.default, self.ones, self.twos):
            comm.join()

    def terms(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        """Of all ranks, the same on each."""
        made = torch.Generator().manual_seed(seed)
        return [(torch.randn(shape, generator=made) * 3).to(self.device, dtype) for _ in range(self.size + 2)]

    def all_have(self, x: torch.Tensor) -> bool:
        """Whether all ranks have these bits."""
        bits = x.contiguous().view(torch.uint8)
        return bool((self.default.all_gather(bits) == bits).all())

    def check_sums(self) -> None:
        """Both ways, alone and added, with and without norm, bit by bit what the reference says."""
        for i, shape in enumerate(SHAPES):
            for dtype in DTYPES:
                *terms, stream, row = self.terms(shape, dtype, i)
                expected, weight, name = reference.total(terms), row[0].contiguous(), f"{shape} {dtype}"
                exact = torch.stack([term.double() for term in terms]).sum(0)
                error = (expected.double() - exact).abs().max()
                assert error <= 2 * exact.abs().max() * torch.finfo(dtype).eps, name
                for comm in (self.ones, self.twos, self.default):
                    x = terms[self.rank].clone()
                    assert comm.all_reduce(x) is x and torch.equal(x, expected), f"sum of {name}"
                    for norm in (None, (weight, EPS)):
                        x = stream.clone()
                        normed = RankSum(comm).add(terms[self.rank].clone(), x, norm)
                        total, all_normed = reference.add(terms, stream, norm)
                        assert torch.equal(x, total), f"added sum of {name}, norm {norm is not None}"
                        assert (normed is None) == (norm is None)
                        if normed is None or all_normed is None:
                            continue
                        wide = reference.reference.rms_norm(total.double(), weight.double(), EPS)
                        error = ((normed.double() - wide).abs() / (1 + wide.abs())).max()
                        assert error <= TOLERANCE[dtype], f"norm of {name}: {error}"
                        assert self.all_have(normed), f"norm of {name}: ranks differ"

    def check_products(self) -> None:
        """Terms that products send themselves, bit by bit as if they had been stored first; between other sums."""
        for i, (m, h, k) in enumerate(PRODUCTS):
            dtype, device = (torch.bfloat16, torch.float16)[i % 2], self.device
            made = torch.Generator().manual_seed(100 + i)
            ys = [torch.randn(m, k, generator=made).to(device, dtype) for _ in range(self.size)]
            ws = [(torch.randn(h, k, generator=made) / k**0.5).to(device, dtype) for _ in range(self.size)]
            stream = torch.randn(m, h, generator=made).to(device, dtype)
            weight = stream[0].contiguous()
            plan = wide_plan(ProductShape(m, h, k), n_processors_of(device))
            store = load(ProductShape(m, h, k), plan, Build(dtype, False, False, False))
            terms = [store(y, w, None, None, None, False, None) for y, w in zip(ys, ws, strict=True)]
            total, expected = reference.add(terms, stream, (weight, EPS))
            for comm in (self.default, self.ones, self.twos):
                for norm in (None, (weight, EPS)):
                    x = stream.clone()
                    normed = comm.add_product(ys[self.rank], ws[self.rank], None, x, norm)
                    wrong = (x != total).nonzero()
                    assert not len(wrong), f"{m} x {h}, norm {norm is not None}: {len(wrong)} wrong from {wrong[0]} on"
                    comm.all_reduce(torch.ones(8, device=device))
                    if normed is None or expected is None:
                        continue
                    error = (normed.double() - expected.double()).abs() / (1 + expected.double().abs())
                    assert error.max() <= 2 * TOLERANCE[dtype] and self.all_have(normed), f"{m} x {h}: {error.max()}"

    def check_every_number(self) -> None:
        """Also those whose bits mean that nothing has come."""
        for dtype in DTYPES:
            bits = torch.arange(-(1 << 16), 1 << 16, dtype=torch.int32, device=self.device) * 32768 + 32767
            bits[-4096:] = -1
            terms = [bits.roll(other).view(dtype) for other in range(self.size)]
            expected = reference.total(terms)
            for comm in (self.ones, self.twos, self.ones, self.twos):
                x = comm.all_reduce(terms[self.rank].clone())
                assert torch.equal(x.isnan(), expected.isnan()) and not x.isnan().all(), dtype
                assert torch.equal(x.nan_to_num(1.5), expected.nan_to_num(1.5)) and self.all_have(x), dtype

    def check_what_goes_through_nccl(self) -> None:
        for dtype, shape in ODD:
            terms = [torch.full(shape, 1.0 + other, device=self.device).to(dtype) for other in range(self.size)]
            expected = torch.stack(terms).sum(0, dtype=dtype)
            assert torch.equal(self.default.all_reduce(terms[self.rank]), expected), (dtype, shape)
        assert self.default.all_reduce(torch.tensor([self.rank]), Reduction.MAX).item() == self.size - 1

    def check_replays(self, sleepy: int | None) -> None:
        """Whole numbers, so that sums are exact; other ones in each replay. sleepy: a rank that is late in each."""
        n, h, bad = 24, 4096, torch.zeros((), dtype=torch.int64, device=self.device)
        turn, at = torch.zeros((), dtype=torch.int64, device=self.device), torch.arange(n * h, device=self.device)

        def term(other: int) -> torch.Tensor:
            return ((at * 7 + 13 * other + 31 * turn) % 61 - 30).to(torch.bfloat16).view(n, h)

        def launch() -> None:
            turn.add_(1)
            terms = [term(other) for other in range(self.size)]
            expected = sum(one.double() for one in terms)
            if self.rank == sleepy:
                torch.cuda._sleep(100_000)
            for comm in (self.ones, self.twos):
                bad.add_((comm.all_reduce(terms[self.rank].clone()).double() != expected).sum())
                own_row = turn.expand(1)  # a product of many rows, in whole numbers too
                y = ((torch.arange(96, device=self.device)[:, None] + own_row) % 5).to(torch.bfloat16).expand(96, 64)
                w = torch.full((4096, 64), 1.0 + self.rank, device=self.device, dtype=torch.bfloat16)
                stream = torch.zeros(96, 4096, device=self.device, dtype=torch.bfloat16)
                comm.add_product(y.contiguous(), w, None, stream, None)
                whole = (y[:, :1] * 64).double() * sum(1 + other for other in range(self.size))
                bad.add_((stream.double() != whole.to(torch.bfloat16).double()).sum())
                for rows in (1, n):
                    stream, weight = terms[0][:rows].clone(), torch.ones_like(terms[0][0])
                    before = stream.double()
                    normed = RankSum(comm).add(terms[self.rank][:rows].clone(), stream, (weight, EPS))
                    bad.add_((stream.double() != before + expected[:rows]).sum())
                    wide = torch.nn.functional.rms_norm(stream.double(), (h,), eps=EPS)
                    bad.add_(((normed.double() - wide).abs() > 0.02 * (1 + wide.abs())).sum())

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        for replay in range(N_REPLAYS):
            if replay % 100 == 50 and replay // 100 % self.size == self.rank:
                time.sleep(0.01)
            graph.replay()
        torch.cuda.synchronize()
        assert bad.item() == 0 and turn.item() == N_REPLAYS + 1, (bad.item(), turn.item())
        for comm in (self.ones, self.twos):
            comm.check()

    def check_that_waiting_ends(self) -> None:
        """Last: what rank 0 has shared is void afterwards."""
        size = 4096
        if self.rank == 0:
            memory = self.default._memory
            assert memory is not None
            for two_shots in (False, True):
                start_s = time.perf_counter()
                memory.reduce(torch.ones(size, device=self.device), two_shots=two_shots, timeout_s=0.5)
                torch.cuda.synchronize()
                assert (time.perf_counter() - start_s > 0.4) != two_shots, "it waits once"
            try:
                self.default.check()
            except EngineError as error:
                assert "waited in vain for rank" in str(error), error
            else:
                raise AssertionError("nobody was told")
        self.default.all_gather(torch.ones(1, device=self.device))
        if self.rank > 0:
            self.default.check()

    def check_that_an_abort_ends_waiting(self) -> None:
        """Last for `twos`: rank 0 sums and the others do not."""
        if self.rank > 0:
            return
        memory = self.twos._memory
        assert memory is not None
        start_s = time.perf_counter()
        memory.reduce(torch.ones(4096, device=self.device), two_shots=True, timeout_s=60)
        threading.Timer(0.5, self.twos.abort).start()
        torch.cuda.synchronize()
        assert 0.4 < time.perf_counter() - start_s < 10, "it ends by the abort, not by its time-out"
        assert memory.lost is None


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    one = Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    assert hopper.obstacle(one.size) is None, hopper.obstacle(one.size)
    assert one.ones._memory is not None, "no peer memory: see the log"
    one.check_sums()
    one.check_products()
    one.check_every_number()
    one.check_what_goes_through_nccl()
    for sleepy in (None, 1):
        one.check_replays(sleepy)
    one.check_that_waiting_ends()
    one.check_that_an_abort_ends_waiting()
    for comm in (one.default, one.ones, one.twos):
        comm.close()


main()
