"""What drafters with weights take, on one rank and on each of two: counted before they are loaded, and then."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Any

import pytest
from speculative_cases import METHODS
from thread_ranks import ThreadComm, together

import quire
from quire.compute.platform import CpuPlatform
from quire.compute.runner.pool import KVPool
from quire.compute.worker import Allocation, Worker
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.core.errors import ConfigError
from quire.engine import workers
from quire.engine.capacity import layout_of
from quire.engine.fit import check_fit
from quire.engine.workers import Made, fit_case
from quire.planner.memory import Room

DEMO = pathlib.Path(quire.__file__).parent / "_models" / "demo"
N_PAGES = 9


def made_with(method: str, n_ranks: int, quantization: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Made]:
    """Options, and what rank 0 is made of."""
    monkeypatch.setattr(workers, "_groups", lambda *given: (None, None))
    config = EngineConfig(
        model=str(DEMO), device="cpu", dtype="float32", quantization=quantization, max_num_seqs=4, max_model_len=64,
        max_num_batched_tokens=32, tensor_parallel_size=n_ranks, speculative_config=METHODS[method], num_threads=1,
    )  # fmt: skip
    return config, workers.make_worker(config, DEMO, read_arch(DEMO), is_server=False)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_it_is_what_there_is(method: str, n_ranks: int, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = made_with(method, n_ranks, quantization, monkeypatch)
    pools, begin = dict[int, list[KVPool]](), KVPool.__init__

    def noted(self: KVPool, *given: Any) -> None:
        begin(self, *given)
        pools.setdefault(threading.get_ident(), []).append(self)

    monkeypatch.setattr(KVPool, "__init__", noted)

    def live(comm: ThreadComm) -> None:
        alone = None if n_ranks == 1 else comm
        worker = Worker(config, made.limits, DEMO, read_arch(DEMO), CpuPlatform(1), alone, draft=made.draft)
        case = fit_case(config, Made(worker, made.limits, made.draft, None))
        facts = worker.load()
        assert worker._small is not None and worker._small.n_bytes > 0
        assert case.sizes.held_bytes == facts.weights_bytes
        worker.allocate(Allocation(N_PAGES, 64, layout=layout_of(config, made.limits, worker.shared)))
        pages = [one for pool in pools[threading.get_ident()] for one in (pool.k, pool.v)]
        if (features := worker.runner.pool.features) is not None:
            pages += [features.first, features.second]
        assert len(pages) > 2 and case.page_bytes * N_PAGES == sum(one.nbytes for one in pages)

    together(n_ranks, live)


def test_a_model_that_fits_without_it_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config, made = made_with("draft_model", 1, "none", monkeypatch)
    case = fit_case(config, made)
    room = Room(1 << 34, case.needed_bytes - 1, is_main=True)
    with pytest.raises(ConfigError, match="does not fit"):
        check_fit(dataclasses.replace(case, room=room))
    alone = dataclasses.replace(case, room=room, sizes_of=made.worker.footprint, draft_numbers=None)
    check_fit(alone)
