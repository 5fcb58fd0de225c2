"""The thread pool: each chunk once whatever the threads, from several callers, inside one another and after fork."""

from __future__ import annotations

import collections
import ctypes
import os
import threading
import time

import pytest

from quire.kernels import native

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")


def run(body: object, n_items: int, chunk: int, n_threads: int) -> None:
    parallel = native.library().quire_parallel
    parallel.argtypes = [BODY, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    parallel.restype = None
    parallel(BODY(body), None, n_items, chunk, n_threads)


@pytest.mark.parametrize("n_threads", [1, 2, 4])
@pytest.mark.parametrize("n_items, chunk", [(1, 1), (7, 1), (64, 5), (1000, 17)])
def test_each_item_once(n_items: int, chunk: int, n_threads: int) -> None:
    for _ in range(20):
        seen: list[int] = []
        run(lambda _, first, end, seen=seen: seen.extend(range(first, end)), n_items, chunk, n_threads)
        assert sorted(seen) == list(range(n_items))


def test_workers_take_part_after_they_slept() -> None:
    """Also after a stall, when the pool works alone for a while."""
    for _ in range(3):
        threads: set[int] = set()

        def body(_: object, first: int, end: int, threads: set[int] = threads) -> None:
            threads.add(threading.get_ident())
            time.sleep(0.01)

        deadline = time.monotonic() + 60
        while len(threads) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            run(body, 8, 1, 2)
        assert len(threads) == 2


def test_loops_inside_loops_and_of_several_callers() -> None:
    counts: collections.Counter[int] = collections.Counter()
    lock = threading.Lock()

    def inner(_: object, first: int, end: int) -> None:
        with lock:
            counts.update(range(first, end))

    def outer(_: object, first: int, end: int) -> None:
        for _ in range(first, end):
            run(inner, 5, 1, 2)

    callers = [threading.Thread(target=run, args=(outer, 6, 1, 3)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == dict.fromkeys(range(5), 24)


def test_a_forked_child_has_its_own_workers() -> None:
    run(lambda *_: None, 8, 1, 2)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        run(lambda _, first, end: seen.extend(range(first, end)), 100, 1, 2)
        os._exit(0 if sorted(seen) == list(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0
