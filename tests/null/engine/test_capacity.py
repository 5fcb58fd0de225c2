"""The size of the KV pool: by need on a CPU, by the share of memory on a GPU, and what is said when it does not fit."""

from __future__ import annotations

import collections
import pathlib
import re

import pytest
from msgspec.structs import replace

from quire.config.context import attending
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import EngineLimits, resolve
from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.core.clock import VirtualClock
from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.result import StepResult
from quire.core.sampling import SamplingParams
from quire.engine.capacity import equation, layout_of, size_pool
from quire.planner.memory import Room

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"
ARCH = read_arch(SHAPES / "qwen3-0.6b")
GIB = 1 << 30


def main(total: int, free: int) -> Room:
    return Room(total, free)


def own(total: int, free: int) -> Room:
    return Room(total, free, is_main=False)


def pages(room: Room, **options: object) -> int:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return size_pool(config, resolve(config, ARCH, "cpu" if room.is_main else "cuda"), ARCH, room)[0]


def test_cpu_pool_holds_all_slots_at_full_length_and_no_more() -> None:
    room = main(1000 * GIB, 900 * GIB)
    assert pages(room, max_model_len=2048, max_num_seqs=4) == 1 + 4 * 128


def test_cpu_pool_takes_at_most_a_quarter_of_free_memory() -> None:
    room = main(24 * GIB, 16 * GIB)
    config = EngineConfig(max_model_len=4096, max_num_seqs=256)
    page_bytes = equation(config, resolve(config, ARCH, "cpu"), ARCH).page_bytes
    assert pages(room, max_model_len=4096, max_num_seqs=256) == 4 * GIB // page_bytes


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_ranks_that_share_tokens_have_room_for_more(method: str) -> None:
    """Two ranks: a page of the ring has twice the tokens in the same bytes, one of Ulysses half the bytes."""
    room, found = own(24 * GIB, 20 * GIB), []
    for n_ranks in (1, 2):
        config = EngineConfig(prefill_context_parallel_size=n_ranks, context_parallel_method=method)  # type: ignore[arg-type]
        limits = resolve(config, ARCH, "cuda")
        arch = attending(ARCH, config, 0)
        terms = equation(config, limits, arch)
        n_pages, _ = size_pool(config, limits, arch, room)
        found.append((terms.page_bytes, terms.page_size, n_pages * terms.page_size, terms.workspace_bytes))
    (n_bytes, size, n_tokens, workspace), (own_bytes, own_size, own_tokens, own_workspace) = found
    expected = (n_bytes // 2, size) if method == "ulysses" else (n_bytes, 2 * size)
    assert (own_bytes, own_size) == expected
    assert 1.9 * n_tokens < own_tokens < 2.1 * n_tokens and own_workspace != workspace


def test_gpu_pool_fills_the_share_beside_what_is_taken() -> None:
    roomy, tight = (pages(own(140 * GIB, free), max_model_len=4096) for free in (130 * GIB, 100 * GIB))
    assert 0 < tight < roomy


def test_widened_keys_count_where_they_are_widened() -> None:
    """By the kernels for Hopper, and not where a row's bits must not depend on its neighbours."""
    n_bytes = {}
    for on_hopper in (True, False):
        for deterministic in (True, False):
            config = EngineConfig(kv_cache_dtype="fp8", deterministic=deterministic)
            limits = resolve(config, ARCH, "cuda", on_hopper=on_hopper)
            n_bytes[on_hopper, deterministic] = equation(config, limits, ARCH).widened_bytes
    assert n_bytes.pop((True, False)) == GIB and set(n_bytes.values()) == {0}


@pytest.mark.parametrize(("options", "mebibytes"), [
    ({}, 0), ({"tensor_parallel_size": 2}, 272), ({"tensor_parallel_size": 4}, 259),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 272),
    ({"tensor_parallel_size": 2, "data_parallel_size": 4}, 272), ({"data_parallel_size": 4}, 0),
])  # fmt: skip
def test_memory_that_ranks_share_is_a_term(
    options: dict[str, int], mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in use once they have met, and is counted once; what the engine is refused for counts it, too."""
    config = EngineConfig(**options)  # type: ignore[arg-type]
    limits = resolve(config, ARCH, "cuda", on_hopper=True)
    terms = equation(config, limits, ARCH)
    assert terms.peers_bytes >> 20 == mebibytes
    assert equation(config, resolve(config, ARCH, "cuda"), ARCH).peers_bytes == 0
    used = 2 * GIB + terms.peers_bytes
    n_pages, _ = size_pool(config, limits, ARCH, own(24 * GIB, 24 * GIB - used), weights_bytes=GIB)
    rest = int(24 * GIB * config.gpu_memory_utilization) - 2 * GIB - terms.fixed_bytes
    assert n_pages == rest // terms.page_bytes
    monkeypatch.setenv("QUIRE_PEER_MEMORY", "0")
    assert equation(config, limits, ARCH).peers_bytes == 0


def test_cpu_pool_holds_one_sequence_of_a_length_that_was_asked_for() -> None:
    """More than a quarter of what is free, where that is too little."""
    room = main(24 * GIB, 6 * GIB)
    assert pages(room, max_model_len=32768) == 1 + 32768 // 16
    with pytest.raises(ConfigError, match="do not fit the KV pool"):
        pages(main(24 * GIB, 3 * GIB), max_model_len=32768)


def test_memory_of_others_is_not_weights() -> None:
    room, config = own(40 * GIB, 5 * GIB), EngineConfig()
    with pytest.raises(ConfigError) as caught:
        size_pool(config, resolve(config, ARCH, "cuda"), ARCH, room, others_bytes=33 * GIB)
    lines = {line.split()[0]: line for line in str(caught.value).splitlines()}
    assert "33.000 GiB" in lines["others"] and "2.000 GiB" in lines["weights"]


def test_a_length_that_was_asked_for_must_fit_and_another_is_lowered() -> None:
    room = main(24 * GIB, 16 * GIB)
    with pytest.raises(ConfigError, match=r"override 100: .* of 1584 tokens, .* at least 257"):
        pages(room, max_model_len=4096, num_gpu_blocks_override=100)
    config = EngineConfig(num_gpu_blocks_override=100)
    assert size_pool(config, resolve(config, ARCH, "cpu"), ARCH, room)[1].max_model_len == 1584


GEMMA = read_arch(SHAPES / "gemma-3-1b")
"""22 windows of 512 and 4 full layers."""


def prompt_steps(n_pages: int, config: EngineConfig, limits: EngineLimits) -> list[int]:
    """Tokens of each step of a prompt as long as the context, alone in the pool."""
    layout = layout_of(config, limits, GEMMA)
    scheduler = Scheduler(
        SchedulerConfig(
            n_pages=n_pages, page_size=config.block_size, kv=layout, max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens, max_model_len=limits.max_model_len,
            pipeline_depth=config.pipeline_depth,
        ),
        VirtualClock(),
    )  # fmt: skip
    prompt = [i % 1000 for i in range(limits.max_model_len - 1)]
    scheduler.submit(Request(request_id="p", prompt_token_ids=prompt, params=SamplingParams(), max_tokens=1, seed=0))
    plans, lengths = collections.deque[StepPlan](), []
    while scheduler.has_work():
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
            lengths.append(plan.n_tokens)
        if plan is None or len(plans) == config.pipeline_depth:
            oldest = plans.popleft()
            n_tokens = sum(oldest.spans.wants)
            scheduler.commit(StepResult(oldest.step, [1] * n_tokens, [1] * n_tokens))
    assert scheduler.stats().preemptions == 0 and sum(lengths) == len(prompt)
    return lengths


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("asked", [0, 20_000])
def test_a_pool_has_room_for_a_lone_prompt_in_whole_steps(depth: int, asked: int) -> None:
    config = EngineConfig(max_num_seqs=1, pipeline_depth=depth, max_model_len=asked, max_num_batched_tokens=1000)
    limits = resolve(config, GEMMA, "cpu")
    room = main(64 * GIB, 60 * GIB) if not asked else main(64 * GIB, GIB)
    n_pages, limits = size_pool(config, limits, GEMMA, room)
    n_one = size_pool(replace(config, disable_hybrid_kv_cache_manager=True), limits, GEMMA, main(64 * GIB, 60 * GIB))[0]
    assert limits.max_model_len == (asked or 32768)
    lengths = prompt_steps(n_pages, config, limits)
    assert len(lengths) == -(-(limits.max_model_len - 1) // 1000)
    assert n_pages * 4 < 0.45 * n_one * 26, "still less than half of what one group takes"


def test_a_smaller_pool_works_in_smaller_steps_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(num_gpu_blocks_override=2300, max_num_seqs=1)
    n_pages, limits = size_pool(config, resolve(config, GEMMA, "cpu"), GEMMA, main(64 * GIB, 60 * GIB))
    lengths = prompt_steps(n_pages, config, limits)
    said = re.search(r"in steps of about (\d+) tokens, not 1024", caplog.text)
    assert said and lengths[0] == 1024 and lengths[-2] == pytest.approx(int(said[1]), rel=0.5)
    terms = equation(config, limits, GEMMA)
    more_pages = terms.prompt_pages(32768) - terms.seq_pages(32768)
    assert f"and {more_pages} more, " in terms.explain(GIB) and "in smaller steps" in terms.explain(GIB)


def test_a_pool_too_small_for_each_group_says_what_would_do() -> None:
    """One full group and six of windows: a sequence takes seven pages at least, and one is a dummy."""
    for n_pages in (2, 5, 7):
        config = EngineConfig(num_gpu_blocks_override=n_pages)
        with pytest.raises(ConfigError, match=r"one in each of the 7 groups of layers, .* to at least 8, or"):
            size_pool(config, resolve(config, GEMMA, "cpu"), GEMMA, main(64 * GIB, 60 * GIB))
    for n_pages, is_one in ((8, False), (2, True)):
        config = EngineConfig(num_gpu_blocks_override=n_pages, disable_hybrid_kv_cache_manager=is_one)
        assert size_pool(config, resolve(config, GEMMA, "cpu"), GEMMA, main(64 * GIB, 60 * GIB))[1].max_model_len == 16
    terms = equation(config := EngineConfig(), resolve(config, GEMMA, "cpu"), GEMMA)
    with pytest.raises(ConfigError, match=r"short by(.|\n)*KV pages .*at least: 8 of 64.00 KiB"):
        terms.pages_within(terms.total_bytes(7))
    assert terms.pages_within(terms.total_bytes(8)) == 8


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match="weights"):
        pages(own(2 * GIB, 1 * GIB))


def test_adapters_that_the_host_keeps_make_the_pool_in_main_memory_smaller() -> None:
    room, options = main(24 * GIB, 16 * GIB), {"max_num_seqs": 512, "max_lora_rank": 64, "max_cpu_loras": 60}
    config = EngineConfig(enable_lora=True, **options)  # type: ignore[arg-type]
    terms = equation(config, resolve(config, ARCH, "cpu"), ARCH)
    assert GIB < terms.kept_adapters_bytes < 8 * GIB
    fewer = pages(room, **options) - pages(room, enable_lora=True, **options)
    assert abs(fewer * terms.page_bytes - terms.kept_adapters_bytes / 4) <= terms.page_bytes
    assert pages(own(80 * GIB, 80 * GIB), enable_lora=True) < pages(own(80 * GIB, 80 * GIB))
