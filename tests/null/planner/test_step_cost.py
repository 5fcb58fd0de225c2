"""The work of a step and its limit, against figures worked out by hand and the limits of known workloads."""

from __future__ import annotations

import msgspec
import pytest
from planner_shapes import LLAMA_8B, SHAPES

from quire.config.arch import ModelArch
from quire.config.model import read_arch
from quire.core.plan import Spans
from quire.planner.calibration import Ceilings
from quire.planner.formats import formats_named
from quire.planner.operators import Kind, Operator, decode_spans, limit_s, step_operators, totals
from quire.planner.shape import head_weights, kv_numbers_per_token, layer_weights, read_weights

H200 = Ceilings(device="h200", read_bytes_per_s=4.3e12, flops_per_s={"bfloat16": 790e12})
ROWS = (Kind.GATHER, Kind.ROWS)


def spans(*rows: tuple[int, int]) -> Spans:
    made = Spans([], [], [], [], [])
    for slot, (start, length) in enumerate(rows):
        made.add(slot, start, length, True)
    return made


def seconds(*rows: tuple[int, int]) -> float:
    return limit_s(step_operators(LLAMA_8B, spans(*rows)), H200)


def flops(arch: ModelArch, *rows: tuple[int, int]) -> float:
    """Of products and attention."""
    return totals([one for one in step_operators(arch, spans(*rows)) if one.kind not in ROWS])[1]


def kept(operators: list[Operator]) -> float:
    """Bytes of weights, keys, values and states; activations left out."""
    return sum(one.n_times * (one.weight_bytes + one.cache_bytes) for one in operators)


def test_one_token_reads_the_weights_once() -> None:
    """3.5 ms a token at batch 1 is the memory limit of an 8B model in bf16 at 4.3 TB/s."""
    assert seconds((128, 1)) == pytest.approx(3.5e-3, rel=0.02)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    """8,192 tokens: 174 ms; 1,024 tokens: 18.6 ms, at 790 TFLOP/s; norms and rotation add 2 to 3 %."""
    assert seconds((0, 1024)) == pytest.approx(18.6e-3, rel=0.05)
    assert seconds((0, 8192)) == pytest.approx(174e-3, rel=0.05)


def test_a_batch_reads_its_context() -> None:
    """256 sequences at about 1,088 tokens: 8.5 ms of keys and values, 4.9 of products, which arithmetic binds."""
    assert seconds(*[(1088, 1)] * 256) == pytest.approx(13.5e-3, rel=0.01)


def test_a_limit_is_the_sum_of_its_operators_each_at_what_binds_it() -> None:
    """A batch of 256: the head's and the layers' products near the corner, attention far on the side of memory."""
    operators = step_operators(LLAMA_8B, decode_spans(256, 1000))
    bound = [max(one.n_bytes / 4.3e12, one.n_flops / 790e12) * one.n_times for one in operators]
    whole = max(sum(one.n_times * one.n_bytes for one in operators) / 4.3e12, totals(operators)[1] / 790e12)
    assert limit_s(operators, H200) == pytest.approx(sum(bound)) and sum(bound) > 1.02 * whole


def test_chunks_add_up() -> None:
    """Two chunks of a prompt do the same arithmetic as one, and read the first chunk's K/V again."""
    whole, first, second = (flops(LLAMA_8B, row) for row in ((0, 100), (0, 60), (60, 40)))
    assert first + second == pytest.approx(whole + 2 * head_weights(LLAMA_8B))
    whole, first, second = (kept(step_operators(LLAMA_8B, spans(row))) for row in ((0, 100), (0, 60), (60, 40)))
    weights = kept(step_operators(LLAMA_8B, spans((0, 1)))) - 2 * 2 * kv_numbers_per_token(LLAMA_8B)
    assert first + second == pytest.approx(whole + weights + 60 * 2 * kv_numbers_per_token(LLAMA_8B))


def test_a_window_hides_old_keys() -> None:
    """Against a count of every row and key, half of the layers with a window."""
    layer = LLAMA_8B.layers[0]
    hidden = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, window=7))
    half = msgspec.structs.replace(LLAMA_8B, layers=(layer, hidden) * (LLAMA_8B.n_layers // 2))
    for rows in [((3, 1),), ((40, 1),), ((0, 20),), ((5, 20),), ((2, 3), (30, 9))]:
        pairs, reads = 0, 0
        for start, n in rows:
            seen = [range(max(0, start + i - 6), start + i + 1) for i in range(n)]
            pairs += sum(map(len, seen))
            reads += len({key for keys in seen for key in keys})
        all_pairs = sum(start + i + 1 for start, n in rows for i in range(n))
        unseen = (all_pairs - pairs) / 2 * 4 * LLAMA_8B.n_layers * LLAMA_8B.n_heads * LLAMA_8B.head_dim
        unread = (sum(start + n for start, n in rows) - reads) / 2 * 2 * kv_numbers_per_token(LLAMA_8B)
        assert flops(LLAMA_8B, *rows) - flops(half, *rows) == pytest.approx(unseen)
        whole, halved = (kept(step_operators(arch, spans(*rows))) for arch in (LLAMA_8B, half))
        assert whole - halved == pytest.approx(unread)


def test_prompts_of_latent_attention_count_the_way_that_takes_fewer() -> None:
    """V2-Lite: a pair takes 2,176 operations a head against lines, 640 where keys and values are made of them."""
    lite = read_arch(SHAPES / "deepseek-v2-lite")
    head, body = 2 * 2048 * 102400, 2 * lite.n_layers * read_weights(lite, 1)

    def of_pairs(start: int, n: int) -> float:
        return (flops(lite, (start, n)) - head - body * n) / (27 * 16)

    assert of_pairs(8192, 1) == pytest.approx(8193 * 2176, rel=1e-3)
    assert of_pairs(0, 1024) == pytest.approx(1024 * 1025 / 2 * 640, rel=1e-2)
    behind = 1024 * 8192 + 1024 * 1025 / 2
    assert of_pairs(8192, 1024) == pytest.approx(behind * 640 + 8192 * 2 * 512 * 256, rel=1e-2)
    assert of_pairs(8192, 64) == pytest.approx((64 * 8192 + 64 * 65 / 2) * 2176, rel=1e-2), "making them takes more"


def test_a_sequence_that_begins_has_no_state_to_read() -> None:
    mamba = read_arch(SHAPES / "mamba2-2.7b")
    fresh, later = (kept(step_operators(mamba, spans((start, 1)))) for start in (0, 7))
    assert later - fresh == sum(spec.n_bytes(2) for spec in mamba.state_specs.values()) > 1e8


def test_a_shared_prefix_is_read_once() -> None:
    alone, together = (step_operators(LLAMA_8B, spans(*[(2100, 1)] * 5), n_spared=n) for n in (0, 2 * 2048 + 160))
    assert kept(alone) - kept(together) == (2 * 2048 + 160) * 2 * kv_numbers_per_token(LLAMA_8B)
    assert totals(alone)[1] == totals(together)[1]


def test_quantised_weights_are_smaller_and_multiplied_faster() -> None:
    """Groups of 128 of four bits and a scale of two bytes, the head too."""
    formats = formats_named("int4-g128")
    whole, small = (kept(step_operators(LLAMA_8B, spans((0, 1)), formats=one)) for one in (None, formats))
    n_weights = LLAMA_8B.n_layers * layer_weights(LLAMA_8B) + head_weights(LLAMA_8B)
    assert whole - small == pytest.approx((2 - 0.5 - 2 / 128) * n_weights)
    both = Ceilings(device="x", read_bytes_per_s=1e18, flops_per_s={"bfloat16": 1e12, "int8": 2e12})
    slow, quick = (limit_s(step_operators(LLAMA_8B, spans((0, 99)), formats=one), both) for one in (None, formats))
    assert 1.9 < slow / quick < 2
