"""Sums over ranks without a GPU: the kernel emulated on the host, three ranks at once, and that it compiles.

Each rank has a copy of the library. Not shown: clusters of blocks, dependent launch, what NVLink does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from emulation import EXACT, emulated_library, emulated_sources

from quire.kernels import jit
from quire.kernels.gemm.sent import SENT_ROWS
from quire.kernels.hopper import FLAGS as NVCC_FLAGS
from quire.kernels.norm.reference import TOLERANCE
from quire.kernels.reduce import hopper, reference
from quire.kernels.reduce.hopper import PeerMemory

SIZE, EPS = 3, 1e-5
LONGEST_BYTES = 1 << 17
MAX_BLOCKS = 2
"""So few that messages have several rounds a block in two hops, and long ones threads with a row of each rank."""
SHAPES = [(1, 4096), (4, 800), (1, 8), (11, 776)]
MOST_NORMED = 1000
"""Longer rows are cut among a cluster's blocks."""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    folder = emulated_sources(tmp_path_factory.mktemp("emulated"))
    header = folder / "reduce" / "peers.h"
    text = header.read_text()
    assert "QUIRE_MAX_BLOCKS = 128" in text
    header.write_text(text.replace("QUIRE_MAX_BLOCKS = 128", f"QUIRE_MAX_BLOCKS = {MAX_BLOCKS}"))
    emulated_library(folder / "reduce.cu", "rank", *EXACT, "-fno-gnu-unique", f"-DQUIRE_RANKS={SIZE}")
    return [ctypes.CDLL(str(shutil.copy(folder / "rank.so", folder / f"rank{rank}.so"))) for rank in range(SIZE)]


@pytest.fixture
def ranks(libraries: list[ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PeerMemory]]:
    class Stream:
        cuda_stream = None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = []
    for rank, library in enumerate(libraries):
        monkeypatch.setattr(hopper, "_library", lambda size, own=library: own)
        library.quire_peers_take.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 3]
        library.emulated_send.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64]
        made.append(PeerMemory(rank, SIZE, LONGEST_BYTES, LONGEST_BYTES))
    for memory in made:
        memory.map([other.handle for other in made])
    yield made
    for memory in made:
        memory.close()


def each(ranks: list[PeerMemory], call: Callable[[int, PeerMemory], Any]) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(call, range(SIZE), ranks))


def test_ranks_get_the_sum_bit_by_bit(ranks: list[PeerMemory], libraries: list[ctypes.CDLL]) -> None:
    """Calls of both kinds, of all types and lengths, one behind the other, each rank in its turn late with a call, or
    so slow in it that others are done with the next one."""
    torch.manual_seed(0)
    cases = [(shape, dtype, two) for two in (False, True) for shape in SHAPES for dtype in hopper.DTYPES]
    cases = cases[::2] + cases[1::2]
    given = [[(torch.randn(shape) * 3).to(dtype) for _ in range(SIZE + 1)] for shape, dtype, _ in cases]
    own = [[terms[rank].clone() for terms in given] for rank in range(SIZE)]
    streams = [[terms[-1].clone() for terms in given] for _ in range(SIZE)]
    weights = [terms[-1][0].flip(0).contiguous() for terms in given]

    def is_normed(i: int) -> bool:
        return i % 3 == 2 and cases[i][0][1] <= MOST_NORMED

    def call(rank: int, memory: PeerMemory) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for i, (_, _, two_shots) in enumerate(cases):
            libraries[rank].emulated_late(50_000 if i % 5 == rank else 0)
            if i % 7 == rank:
                time.sleep(0.01)
            residual = None if i % 3 == 0 else streams[rank][i]
            norm = (weights[i], EPS) if is_normed(i) else None
            assert memory.misfit(own[rank][i], residual, norm) == ""
            found.append(memory.reduce(own[rank][i], residual, norm, two_shots=two_shots, timeout_s=20))
        return found

    normed = each(ranks, call)
    for i, (shape, dtype, two_shots) in enumerate(cases):
        stream, name = given[i][-1], f"{shape} {dtype} {'two shots' if two_shots else 'one shot'}"
        total, expected = reference.add(given[i][:SIZE], stream, (weights[i], EPS))
        for rank in range(SIZE):
            if i % 3 == 0:
                assert torch.equal(own[rank][i], reference.total(given[i][:SIZE])), name
                continue
            assert torch.equal(streams[rank][i], total), name
            if is_normed(i):
                assert expected is not None and torch.equal(normed[rank][i], normed[0][i]), name
                error = (normed[rank][i].double() - expected.double()).abs() / (1 + expected.double().abs())
                assert error.max() <= TOLERANCE[dtype], name
    assert all(memory.lost is None for memory in ranks)


@pytest.mark.parametrize("two_shots", [False, True])
def test_a_sum_longer_than_the_memory_is_several(ranks: list[PeerMemory], two_shots: bool) -> None:
    torch.manual_seed(1)
    h = 248
    given = [torch.randn(5 * LONGEST_BYTES // (2 * h * 4), h) for _ in range(SIZE + 1)]
    weight, stream = given[-1][3].contiguous(), [given[-1].clone() for _ in range(SIZE)]
    plain = [term.clone() for term in given[:SIZE]]

    def call(rank: int, memory: PeerMemory) -> torch.Tensor | None:
        memory.reduce(plain[rank], two_shots=two_shots, timeout_s=20)
        return memory.reduce(given[rank], stream[rank], (weight, EPS), two_shots=two_shots, timeout_s=20)

    total, expected = reference.add(given[:SIZE], given[-1], (weight, EPS))
    for rank, normed in enumerate(each(ranks, call)):
        assert torch.equal(plain[rank], reference.total(given[:SIZE])) and torch.equal(stream[rank], total)
        assert (normed.double() - expected.double()).abs().max() <= 8 * TOLERANCE[torch.float32]


def sent_by(
    library: ctypes.CDLL, rank: int, memory: PeerMemory, term: torch.Tensor, n_sums: int, *, to_all: bool
) -> None:
    """As a product of many rows does (csrc/cuda/gemm/wide_sent.h)."""
    places, row_bytes = memory.places(to_all=to_all), term.shape[1] * term.itemsize
    for box, rows in enumerate(term.split(SENT_ROWS)):
        for owner in range(SIZE) if to_all else [box % SIZE]:
            at = (box if to_all else box // SIZE) * SENT_ROWS * row_bytes + n_sums % 2 * places.parity_bytes
            library.emulated_send(places.to[owner] + at, rows.data_ptr(), rows.nbytes // 4)


def test_products_may_have_sent_their_terms(ranks: list[PeerMemory], libraries: list[ctypes.CDLL]) -> None:
    """To all or to owners, in several launches, with and without norm, between other sums; rows that end in the middle
    of a box, and more of them afterwards."""
    torch.manual_seed(2)
    cases = [(70, 192, torch.float32), (19, 128, torch.bfloat16), (300, 192, torch.float32), (241, 256, torch.float16)]
    cases = [(*case, to_all, with_norm) for case in cases for to_all in (False, True) for with_norm in (False, True)]
    given = [[torch.randn(m, h).to(dtype) for _ in range(SIZE + 1)] for m, h, dtype, *_ in cases]
    streams = [[terms[-1].clone() for terms in given] for _ in range(SIZE)]

    def call(rank: int, memory: PeerMemory) -> list[torch.Tensor | None]:
        found, n_sums = [], 0
        for i, (m, h, dtype, to_all, with_norm) in enumerate(cases):
            if i % 3 == 0:
                memory.reduce(torch.ones(8), two_shots=i % 2 == 0, timeout_s=20)
                n_sums += i % 2 == 0
            normed = torch.empty(m, h, dtype=dtype) if with_norm else None
            norm = (given[i][-1][0].contiguous(), EPS) if with_norm else None
            most = memory.most_sent_rows(h * dtype.itemsize, to_all=to_all)
            for begin in range(0, m, most):
                part = slice(begin, begin + most)
                sent_by(libraries[rank], rank, memory, given[i][rank][part], n_sums, to_all=to_all)
                into = None if normed is None else normed[part]
                memory.reduce_sent(streams[rank][i][part], norm, into, to_all=to_all, timeout_s=20)
                n_sums += 1
            found.append(normed)
        return found

    normed = each(ranks, call)
    for i, (*_, dtype, _, with_norm) in enumerate(cases):
        total, expected = reference.add(given[i][:SIZE], given[i][-1], (given[i][-1][0].contiguous(), EPS))
        for rank in range(SIZE):
            assert torch.equal(streams[rank][i], total), cases[i]
            if with_norm:
                error = (normed[rank][i].double() - expected.double()).abs() / (1 + expected.double().abs())
                assert error.max() <= TOLERANCE[dtype] and torch.equal(normed[rank][i], normed[0][i]), cases[i]
    assert all(memory.lost is None for memory in ranks)


@pytest.mark.parametrize("dtype", hopper.DTYPES)
def test_every_number_comes(ranks: list[PeerMemory], dtype: torch.dtype) -> None:
    """Also those whose bits mean that nothing has come: NaNs, and among them infinities and zeros of both signs."""
    bits = torch.tensor([-1, -1, -65536, 0x3F803F80, 0, -(2**31), 0x40004000, 0] * 512, dtype=torch.int32)
    bits[6::64] = 0x7F800000
    given = [bits.roll(rank).view(dtype).clone() for rank in range(SIZE)]
    expected = reference.total(given)
    for two_shots in (False, True, False, True):
        own = [term.clone() for term in given]
        each(ranks, lambda rank, memory, own=own, two=two_shots: memory.reduce(own[rank], two_shots=two, timeout_s=20))
        assert all(memory.lost is None for memory in ranks)
        for found in own:
            assert torch.equal(found.isnan(), expected.isnan()) and not expected.isnan().all()
            assert torch.equal(found.nan_to_num(1.5), expected.nan_to_num(1.5))
            assert torch.equal(found.view(torch.int32), own[0].view(torch.int32)), "ranks differ"


@pytest.mark.parametrize("two_shots", [False, True])
def test_who_waits_in_vain_says_for_whom(ranks: list[PeerMemory], two_shots: bool) -> None:
    x = torch.ones(2048 if two_shots else 8)  # a row of each rank

    def call(rank: int, memory: PeerMemory) -> None:
        if rank != 1:
            memory.reduce(x.clone(), two_shots=two_shots, timeout_s=0.2)
            start_s = time.monotonic()
            memory.reduce(x.clone(), two_shots=two_shots, timeout_s=60)
            assert time.monotonic() - start_s < 30, "it waits once"

    each(ranks, call)
    assert [memory.lost for memory in ranks] == [(1, 1), None, (1, 1)]


def test_what_does_not_fit_is_said(ranks: list[PeerMemory]) -> None:
    memory, x, even = ranks[0], torch.ones(3, 5), torch.ones(4, 8)
    for given, norm, word in (
        (x, None, "multiple of 16"),
        (even[:, :4], None, "contiguous"),
        (even.double(), None, "one type"),
        (even[:0], None, "nothing to sum"),
        (torch.ones(4, 6)[:2], (torch.ones(6), EPS), "a row of 24 bytes"),
        (torch.ones(1, 4)[0, 1:], None, "multiple of 16"),
    ):
        assert word in memory.misfit(given, None, norm), word
    assert memory.misfit(even, even, (torch.ones(8), EPS)) == ""


def test_it_compiles_for_hopper() -> None:
    nvcc = jit.compiler("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = str(jit.sources_folder() / "cuda" / "reduce.cu")
    command = [nvcc, *NVCC_FLAGS, "-DQUIRE_RANKS=3", "-Werror", "all-warnings", "-cubin", "-o", "/dev/null", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
