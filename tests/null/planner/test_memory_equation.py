"""The memory equation, its inverse, and what it says when nothing fits."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_shapes import LLAMA_8B, QWEN_600M

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.resolve import AdapterLimits, resolve
from quire.core.errors import ConfigError
from quire.planner.adapters import adaptable, kept_bytes, row_bytes
from quire.planner.memory import GRAPH_OWN_BYTES, WIDENED_BYTES, MemoryEquation, n_passing
from quire.planner.sampling import row_bytes as row_bytes_of_lists


def equation(arch: ModelArch = LLAMA_8B, graph_sizes: tuple[int, ...] = (), **changes: int) -> MemoryEquation:
    limits = {"page_size": 16, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    return MemoryEquation(
        arch=arch, graph_sizes=graph_sizes, **{"weights_bytes": 2 * arch.n_parameters, **limits, **changes}
    )


def test_weights_of_known_models() -> None:
    assert LLAMA_8B.n_parameters == 8_030_261_248, "the count that its authors publish"
    assert QWEN_600M.n_parameters == 596_049_920


def test_a_page_of_llama_8b_is_two_mebibytes() -> None:
    assert equation().page_bytes == 2 * 2**20


def test_tokens_that_fit_on_an_h200() -> None:
    n_tokens = equation().pages_within(int(0.9 * 139 * 2**30)) * 16
    assert 850_000 < n_tokens < 920_000


def test_the_samplers_lists_count_where_few_tokens_exist() -> None:
    """On a GPU 64 KiB and more a row, beside logits as they come, those whose logprobs are asked for, and a float32
    copy that is changed."""
    small = msgspec.structs.replace(LLAMA_8B, vocab_size=32_000)
    host, device = equation(small, itemsize=2), equation(small, itemsize=2, on_gpu=True)
    assert host.logits_bytes == 256 * 32_000 * 8
    assert device.logits_bytes == 256 * (32_000 * (2 + 2 + 4) + row_bytes_of_lists(32_000, 2))
    assert row_bytes_of_lists(32_000, 2) > 64 << 10


def test_float32_logits_are_changed_in_place_unless_choices_are_captured() -> None:
    """Captured ones keep their logits and a copy that is changed, beside which others of a step have logits and what
    they were before: four of [rows, vocab] in float32. Kernel by kernel it is two."""
    n_bytes = 256 * LLAMA_8B.vocab_size * 4
    lists = 256 * row_bytes_of_lists(LLAMA_8B.vocab_size, 4)
    eager = equation(itemsize=4, on_gpu=True)
    captured = equation(graph_sizes=(256,), itemsize=4, on_gpu=True)
    assert eager.logits_bytes == 2 * n_bytes + lists
    assert captured.logits_bytes == 3 * n_bytes + lists
    fewer = msgspec.structs.replace(LLAMA_8B, vocab_size=1)
    no_logits = equation(fewer, graph_sizes=(256,), itemsize=4, on_gpu=True)
    assert captured.graphs_bytes - no_logits.graphs_bytes == n_bytes - 256 * 4
    bfloat16 = equation(graph_sizes=(256,), itemsize=2, on_gpu=True)
    assert bfloat16.logits_bytes == 256 * (LLAMA_8B.vocab_size * 8 + row_bytes_of_lists(LLAMA_8B.vocab_size, 2))


def test_captured_logits_are_of_all_tokens_that_a_step_chooses() -> None:
    """Also of more drafts than there are sequences in a captured decode."""
    few, many = (equation(graph_sizes=(256,), max_sampled=n, on_gpu=True) for n in (256, 2304))
    assert many.graphs_bytes - few.graphs_bytes == 2048 * LLAMA_8B.vocab_size * 2


@pytest.mark.parametrize(("n_ranks", "one_hop"), [(0, 0), (1, 0), (2, 4 << 20), (4, 256 << 10), (8, 74_896), (9, 0)])
def test_what_gpus_share_for_their_sums(n_ranks: int, one_hop: int) -> None:
    """Two parities: for each rank a part in one hop and a share of 64 MiB, both of 64 KiB a row more; and the whole."""
    alone, ranks = equation(), equation(sum_ranks=n_ranks)
    found = ranks.fixed_bytes - alone.fixed_bytes
    assert found == ranks.peers_bytes
    exact = one_hop and (256 << 20) + 1024 + 2 * n_ranks * (one_hop + 2 * 4096 * 16)
    assert exact <= found <= exact + 2 * n_ranks * 512
    assert ("peers" in ranks.explain(1 << 40)) == bool(one_hop)


@given(st.integers(0, 2**42), st.integers(1, 1024), st.integers(1, 65536), st.sampled_from([1, 16, 128]))
def test_the_inverse_is_exact(budget: int, seqs: int, tokens: int, size: int) -> None:
    memory = equation(QWEN_600M, max_num_seqs=seqs, max_num_batched_tokens=tokens, page_size=size)
    try:
        n_pages = memory.pages_within(budget)
    except ConfigError:
        assert memory.total_bytes(memory.min_pages) > budget
    else:
        assert n_pages >= memory.min_pages == 2
        assert memory.total_bytes(n_pages) <= budget < memory.total_bytes(n_pages + 1)


def test_every_limit_costs_something() -> None:
    base = equation().fixed_bytes
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "weights_bytes", "itemsize"):
        assert equation(**{name: 2 * getattr(equation(), name)}).fixed_bytes > base, name
    assert equation(kv_itemsize=1).page_bytes * 2 == equation().page_bytes


def test_keys_in_e4m3_as_prompts_read_them() -> None:
    """One layer of all that sequences may hold, in the activations' type, up to a limit."""
    few = {"kv_itemsize": 1, "max_num_seqs": 2, "max_model_len": 4096}
    more = equation(**few, widens_keys=True).fixed_bytes - equation(**few).fixed_bytes
    assert more == 2 * (4096 * 2 * 8 * 128 * 2 + 256 * 4), "K and V of 8 heads of 128, and a page table"
    many = equation(kv_itemsize=1, widens_keys=True).fixed_bytes - equation(kv_itemsize=1).fixed_bytes
    assert many == WIDENED_BYTES


def test_captured_steps_take_partial_rows_and_logits_once() -> None:
    none, one, two = (equation(QWEN_600M, sizes) for sizes in ((), (256,), (256, 128)))
    assert none.graphs_bytes == 0
    logits = 256 * 151936 * 2
    partial = 2 * 256 * 2 * 129 * 4
    assert logits + partial < one.graphs_bytes < 1.5 * (logits + partial)
    assert two.graphs_bytes - one.graphs_bytes == GRAPH_OWN_BYTES
    assert one.fixed_bytes - none.fixed_bytes == one.graphs_bytes
    assert one.pages_within(16 * 2**30) < none.pages_within(16 * 2**30)
    assert "--enforce-eager" in one.explain(16 * 2**30)


def test_larger_captured_steps_take_more() -> None:
    sizes = [dataclasses.replace(equation(QWEN_600M, (256,)), mixed_rows=n).graphs_bytes for n in (0, 512, 1024)]
    assert sizes[0] < sizes[1] < sizes[2] < 2**30


def test_what_does_not_fit_explains_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        equation().pages_within(10 * 2**30)
    text = str(caught.value)
    assert "a budget of 10.000 GiB, short by" in text
    for term in ("weights", "workspace", "logits", "tables", "KV pages"):
        assert term in text
    for option in (
        "--max-num-seqs 256",
        "--max-num-batched-tokens 8192",
        "--max-model-len 8192",
        "--gpu-memory-utilization",
    ):
        assert option in text
    assert "512 pages, 1.000 GiB" in text
    assert "--enforce-eager" not in text, "no step is captured"
    small = equation().explain(1 << 20)
    assert "0.000" not in small and "a budget of 1.00 MiB, short by" in small
    assert "KV pages fit" in equation().explain(100 * 2**30)


def test_a_stage_has_copies_of_rows_that_come_and_go() -> None:
    assert [n_passing(2, stages) for stages in (1, 2, 4)] == [0, 4, 6]
    row_bytes, wide = 4096 * 2, msgspec.structs.replace(LLAMA_8B, float32_stream=True)
    for arch, n_bytes in ((LLAMA_8B, row_bytes), (wide, 2 * row_bytes)):
        alone, stage = (equation(arch, (256,), n_passing=n) for n in (0, 4))
        assert stage.fixed_bytes - alone.fixed_bytes == 4 * 8192 * n_bytes


def test_adapters_of_llama_8b() -> None:
    """Of rank 64, in bfloat16, as PEFT counts them: 167,772,160 numbers."""
    assert len(list(adaptable(LLAMA_8B))) == 4 * 32
    assert kept_bytes(LLAMA_8B, 64, 2) == 2 * 167_772_160
    kept = 2 * 167_772_160 // 4
    assert kept_bytes(LLAMA_8B, 16, 2) == kept
    on_cpu = 2 * (4096 + 2 * 14336) + 4 * 2 * 16  # gate and up
    on_gpu = 14 * (16 + 1) * 4  # down, in 14 parts of the sum, and a sum of squares
    assert row_bytes(LLAMA_8B, 16, 2, in_main=False) == on_gpu
    assert row_bytes(LLAMA_8B, 16, 2, in_main=True) == on_cpu
    base = equation()
    gpu = dataclasses.replace(base, adapters=AdapterLimits(16, 100, in_main=False))
    assert gpu.fixed_bytes - base.fixed_bytes == 8192 * on_gpu
    cpu = dataclasses.replace(base, adapters=AdapterLimits(16, 100, in_main=True))
    assert cpu.fixed_bytes - base.fixed_bytes == 8192 * on_cpu + 100 * kept
    assert "adapters" in cpu.explain(2**40) and "--max-lora-rank 16 or --max-cpu-loras 100" in cpu.explain(2**40)
    assert "--max-cpu-loras" not in gpu.explain(2**40) and "adapters" not in base.explain(2**40)


def test_adapters_are_those_of_the_options() -> None:
    config = EngineConfig(enable_lora=True, max_loras=3, max_lora_rank=64)
    assert resolve(config, LLAMA_8B, "cuda").adapters == AdapterLimits(64, 12, in_main=False)
    assert resolve(EngineConfig(), LLAMA_8B, "cuda").adapters is None
