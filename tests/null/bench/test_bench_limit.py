"""Limits, breakdown and trace of steps whose times are written down here."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import msgspec
import pytest

from quire.bench.breakdown import Capture, Kernel, breakdown, kind_of, outermost, own_times
from quire.bench.limit import Case, ceilings_line, compared, lines, part_limits_ms, step_limits_s
from quire.bench.trace import check_trace_path, write_trace
from quire.cli.main import main
from quire.config.arch import ModelArch
from quire.config.attention import AttentionSpec
from quire.config.experts import ExpertsSpec, RoutingSpec
from quire.config.feed_forward import FeedForwardSpec
from quire.config.layers import LayerSpec, NormSpec
from quire.config.mesh import Mesh
from quire.core.errors import ConfigError
from quire.core.plan import Spans
from quire.engine.step_record import HostTimes, StepRecord
from quire.planner.calibration import Ceilings
from quire.planner.formats import formats_named
from quire.planner.operators import limit_s, step_operators

NORM = NormSpec(eps=1e-5)
LAYER = LayerSpec(
    mixer=AttentionSpec(n_heads=0, n_kv_heads=1, head_dim=1, scale=1.0, rope=None),
    ffn=FeedForwardSpec(size=1), norm=NORM,
)  # fmt: skip
WIDE = LayerSpec(
    mixer=AttentionSpec(n_heads=4, n_kv_heads=4, head_dim=16, scale=1.0, rope=None),
    ffn=FeedForwardSpec(size=256), norm=NORM,
)  # fmt: skip
TOY = ModelArch(
    family="llama", layers=(LAYER,) * 3, hidden_size=1, vocab_size=2, norm=NORM, tie_embeddings=True, max_position=99,
    max_position_scaled=99, dtype="float32",
)  # fmt: skip
"""5 weights a layer, 2 in the head, 2 numbers of K/V a token and layer."""
CASE = Case(arch=TOY, formats=formats_named("bfloat16"), page_size=4)


def ceilings(reads: float, rate: float) -> Ceilings:
    return Ceilings(device="toy", read_bytes_per_s=reads, flops_per_s={"bfloat16": rate})


def record(
    step: int, spans: Spans, times: HostTimes | None = None, shared: list[tuple[list[int], int]] | None = None
) -> StepRecord:
    n, n_tokens = len(spans), sum(spans.lengths)
    return StepRecord(step, 0.0, n, n_tokens, 0, n, 0, 0.0, 0.0, times or HostTimes(0.0), spans, shared or [])


def decodes(*starts: int) -> Spans:
    n = len(starts)
    return Spans(list(range(n)), list(starts), [1] * n, [0] * n, [True] * n)


def test_limit_of_known_spans() -> None:
    """A token, in numbers of two bytes: 15 weights of layers and 2 of the head; keys and values read, its own too, and
    written; rows in and out of 22 products, 7 norms, the embedding, the rotation and the attention (no query heads)."""
    rows = 3 * (3 + 1 + 3 + 2) + (1 + 2) + 7 * 2 + 2 + 3 * 2
    one, kept = 15 + 2 + rows, 6 * (8 + 1 + 1)
    steps = [record(0, decodes(8)), record(1, decodes(8, 8), shared=[([0, 1], 1)])]
    slow = step_limits_s(CASE, ceilings(10.0, 1e9), steps)
    assert slow == [pytest.approx(2 * (one + kept) / 10), pytest.approx(2 * (17 + 2 * rows + 2 * kept - 6 * 4) / 10)]
    operators = step_operators(TOY, decodes(8))
    assert slow[0] == limit_s(operators, ceilings(10.0, 1e9)) and step_limits_s(
        CASE, ceilings(1e9, 10.0), steps[:1]
    ) == [pytest.approx(sum(one.n_times * one.n_flops for one in operators) / 10)]


def test_experts_that_nobody_chose_are_not_in_the_limit() -> None:
    routing = RoutingSpec(n_chosen=2)
    ffn = ExpertsSpec(size=1, n_experts=8, routing=routing)
    arch = msgspec.structs.replace(TOY, layers=(msgspec.structs.replace(LAYER, ffn=ffn),) * 3)
    case, step, reads = (
        Case(arch=arch, formats=CASE.formats, page_size=4),
        record(0, decodes(*[8] * 6)),
        ceilings(10.0, 1e9),
    )
    even, counted = (
        step_limits_s(case.counted(counts), reads, [step])[0]
        for counts in ([[1] * 8] * 3, [[9, 9, 0, 0, 0, 0, 0, 0]] * 3)
    )
    assert step_limits_s(case, reads, [step])[0] == pytest.approx(even), "nothing was counted"
    n_even = 8 * (1 - (1 - 2 / 8) ** 6)
    assert even - counted == pytest.approx(3 * 2 * 3 * (n_even - 2) / 10)
    parts = [part_limits_ms(one, reads, [step]) for one in (case, case.counted([[9, 9, 0, 0, 0, 0, 0, 0]] * 3))]
    assert parts[0].pop("experts") > parts[1].pop("experts") and parts[0] == parts[1]


def test_lines_for_people() -> None:
    limits = {
        "decode_step_ms": compared("decode_step_ms", 3.52, 4.05),
        "output_tokens_per_second": compared("output_tokens_per_second", 11_900, 10_900),
        "first_token_ms": compared("first_token_ms", 1.0, 20.0),
        "latency_ms": compared("latency_ms", 711.0, 11.4),
    }
    limits["decode_step_ms"], steps = compared("decode_step_ms", 9.0, 1.5), limits["decode_step_ms"]
    beyond = (
        "attained 1.5 ms a decode step (limit 9), 11.4 ms in all (limit 711): faster than these limits, which "
        "therefore do not hold. Other work slowed the measurement of the ceilings, or the weights fit a cache"
    )
    within = ["limit 11,900 output tok/s; attained 10,900 = 92 %", "limit 1 ms to the first token; attained 20 = 5.0 %"]
    assert lines(limits, has_experts=False) == [*within, beyond]
    experts = ", or the rows of a step chose fewer experts than rows that are apart would"
    assert lines(limits, has_experts=True) == [*within, beyond + experts]
    only = "limit 3.52 ms a decode step; attained 4.05 = 87 %"
    assert lines({"decode_step_ms": steps}, has_experts=True) == [only]
    assert ceilings_line(ceilings(4.54e12, 790e12), "bfloat16") == (
        "ceilings in this run: reads 4,540 GB/s, bfloat16 products 790 TFLOP/s"
    )


KERNELS = {
    "attention": [
        "void quire::small_lines_kernel(QuireAttnArgs, CUtensorMap_st, CUtensorMap_st, BoxShape)",
        "attention_large(QuireAttnArgs, CUtensorMap, CUtensorMap, int)",
        "merge_kernel(QuireAttnArgs)",
        "small", "large", "merge",
        "void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits>",
        "quire_attention",
        "aten::scaled_dot_product_attention",
    ],
    "linear": [
        "nvjet_tst_128x8_64x12_4x1_v_bz_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "gemm(CUtensorMap, CUtensorMap, QuireGemmArgs)",
        "mkldnn::_linear_pointwise", "aten::linear", "aten::addmm", "aten::mm", "quire_linear",
    ],
    "experts": [
        "sort_kernel(QuireMoeSortArgs)", "moe_few(CUtensorMap, CUtensorMap, QuireMoeFewArgs)",
        "void moe_wide<true>(CUtensorMap, CUtensorMap, CUtensorMap)", "route", "place", "up", "down",
        "quire_moe_experts", "quire_experts",
    ],
    "state": [
        "convolve_pieces", "convolve_rows", "keep_inputs", "solve_pieces", "scan_pieces", "scan_rows", "norm_rows",
        "quire_state_scan_ssm",
    ],
    "sums over ranks": [
        "void quire::(anonymous namespace)::two_shots_kernel<__nv_bfloat16, true>(QuirePeers, quire::Call)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "quire_ranks_all_reduce",
    ],
    "other kernels": [
        "_norm", "_silu_mul", "_rotate_and_store", "_select", "quire_rms_norm", "quire_rope", "aten::embedding",
        "aten::add",
        "Memcpy DtoH (Device -> Pinned)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kinds_of_kernels(kind: str, name: str) -> None:
    assert kind_of(name) == kind


def test_experts_and_states_are_parts_where_a_model_has_them() -> None:
    kernels = [Kernel("moe_few", 11.0, 12.0), Kernel("nvjet", 12.0, 14.0), Kernel("scan_rows", 14.0, 17.0)]
    capture = dataclasses.replace(captured(), kernels=kernels)
    found = breakdown(capture).device_ms
    assert list(found) == ["attention", "linear", "experts", "state", "other kernels", "gaps"]
    assert found["state"] == 3 * found["experts"] > 0
    assert list(breakdown(captured()).device_ms) == ["attention", "linear", "other kernels", "gaps"]


def test_sums_and_waiting_are_parts_where_there_are_ranks() -> None:
    """A sum that takes longer than its kernel usually does has waited; what is beside a product is the product's."""
    calls = [(10.0, 12.0, "nvjet"), (11.0, 13.0, "sum(QuirePeers)"), (13.0, 14.0, "sum(QuirePeers)")]
    calls += [(14.0, 17.0, "sum(QuirePeers)"), (17.0, 17.5, "ncclDevKernel_AllGather"), (17.5, 18.0, "_norm")]
    kernels = [Kernel(name, start, end) for start, end, name in calls]
    found = breakdown(dataclasses.replace(captured(), kernels=kernels), {"linear": 900.0, "sums over ranks": 9000.0})
    assert found.device_ms == {
        "attention": 0.0, "linear": 1000.0, "sums over ranks": 1750.0, "other kernels": 250.0,
        "waiting for ranks": 1000.0, "gaps": 1000.0,
    }  # fmt: skip
    assert found.others_ms == {"norms": 250.0}
    assert "linear 1000.00 ms (20 %, limit 900.00), sums over ranks 1750.00 ms (35 %)," in found.lines()[1]
    assert found.lines()[2] == "          of other kernels: norms 250.00 ms (5 %)"


@pytest.mark.parametrize(("name", "part"), [
    ("void norm_kernel<2>(QuireNormArgs, float)", "norms"), ("quire_rms_norm", "norms"), ("_select", "sampling"),
    ("void collect_kernel<2>(QuireCollectArgs)", "sampling"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>", "sampling"),
    ("_rotate_and_store", None), ("norm_rows", None),
])  # fmt: skip
def test_other_kernels_are_told_apart(name: str, part: str | None) -> None:
    """The last is a kernel of states."""
    found = breakdown(dataclasses.replace(captured(), kernels=[Kernel(name, 12.0, 13.0)])).others_ms
    assert found == ({} if part is None else {part: 500.0})


def test_limits_of_parts_are_of_one_rank() -> None:
    spans, found = decodes(8), ceilings(10.0, 1e9)
    alone = part_limits_ms(CASE, found, [record(0, spans), record(1, spans)])
    assert sum(alone.values()) == pytest.approx(1e3 * step_limits_s(CASE, found, [record(0, spans)])[0])
    assert min(alone.values()) > 0 and list(alone) == ["other kernels", "linear", "attention"]
    arch = msgspec.structs.replace(TOY, hidden_size=64, vocab_size=128, layers=(WIDE,) * 3)
    cases = [Case(arch=arch, formats=CASE.formats, page_size=4, mesh=mesh) for mesh in (Mesh(), Mesh(tp=4))]
    one, ranks = (part_limits_ms(case, found, [record(0, spans)], link_bytes_per_s=2.0) for case in cases)
    n_sums, sent = 3 * 2 + 1, 2 * 3 / 4 * 64 * 2
    logits = 3 * 128 / 4 * 2
    assert ranks["sums over ranks"] == pytest.approx(1e3 * (n_sums * sent + logits) / 2.0)
    assert one["linear"] / 4 < ranks["linear"] < one["linear"] / 3, "rows are read whole by every rank"


def captured() -> Capture:
    """Two steps between 10 and 20 s, and what surrounds them."""
    times = [
        HostTimes(0.0, 1.0, 2.0, 9.0, 10.0, 10.5),  # commits inside; its result came at the beginning
        HostTimes(8.0, 8.5, 9.0, 11.0, 15.0, 15.5),
        HostTimes(10.5, 10.75, 11.0, 16.0, 20.0, 21.0),
        HostTimes(15.5, 15.75, 16.0, 21.0, 25.0, 26.0),  # planned inside
    ]
    kernels = [
        Kernel("nvjet_a", 9.0, 11.0),
        Kernel("merge", 10.5, 12.0),  # half of it beside the one before
        Kernel("_norm", 11.0, 11.5),  # all of it
        Kernel("nvjet_a", 13.0, 14.0),
        Kernel("_norm", 19.5, 22.0),
        Kernel("nvjet_b", 22.0, 23.0),
    ]
    return Capture(10.0, 20.0, [record(5 + i, decodes(*[4] * (i + 1)), one) for i, one in enumerate(times)], kernels)


def test_parts_add_up_to_the_step() -> None:
    found = breakdown(captured())
    assert (found.n_steps, found.n_tokens, found.step_ms) == (2, 2.5, 5000.0)
    assert found.device_ms == {"attention": 500.0, "linear": 1000.0, "other kernels": 250.0, "gaps": 3250.0}
    assert found.host_ms == {"schedule": 250.0, "submit": 250.0, "wait": 4000.0, "commit": 500.0, "other": 0.0}
    assert [kernel["calls"] for kernel in found.kernels if kernel["name"] == "nvjet_a"] == [1.0]
    assert {kernel["name"] for kernel in found.kernels} == {"nvjet_a", "merge", "_norm"}
    assert found.lines()[1] == (
        "  device  attention 500.00 ms (10 %), linear 1000.00 ms (20 %), "
        "other kernels 250.00 ms (5 %), gaps 3250.00 ms (65 %)"
    )


def test_an_empty_profile_is_no_idle_device() -> None:
    found = breakdown(dataclasses.replace(captured(), kernels=[]))
    assert "saw no kernel" in found.lines()[1] and "gaps" not in found.lines()[1]


def test_outermost_operators_stay() -> None:
    inner, outer, after = Kernel("aten::mm", 1.0, 2.0), Kernel("aten::linear", 1.0, 3.0), Kernel("aten::add", 3.0, 4.0)
    assert outermost([after, inner, outer, Kernel("aten::t", 2.5, 3.0)]) == [outer, after]
    assert sum(seconds for _, seconds in own_times(Capture(0.0, 9.0, [], [outer, after]))) == 3.0


def test_trace_has_a_row_for_each_side(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "trace.json"
    write_trace(str(file), [captured()], "a title")
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["device", "host"]
    rows: dict[str, list[dict[str, object]]] = {"host": [], "device": []}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    assert {event["name"] for event in rows["host"]} >= {
        "schedule 7: 3 tokens",
        "submit 7: 3 tokens",
        "wait 6: 2 tokens",
    }
    assert [event["name"] for event in rows["device"]] == ["nvjet_a", "merge", "_norm", "nvjet_a", "_norm"]
    for row in rows.values():
        row.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in itertools.pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, "nothing overlaps in a row"
    starts = {event["name"]: event["ts"] for row in rows.values() for event in reversed(row)}
    assert starts["nvjet_a"] - starts["wait 6: 2 tokens"] == pytest.approx(-2e6), "one clock, in microseconds"
    assert min(starts.values()) == 0


def test_bad_paths_are_refused_at_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        check_trace_path(str(tmp_path))
    with pytest.raises(ConfigError, match="folder does not exist"):
        check_trace_path(str(tmp_path / "no" / "trace.json"))
    missing = ["bench", "latency", "no-such-model", "--profile", str(tmp_path / "no" / "trace.json")]
    assert main(missing) != 0 and "--profile" in capsys.readouterr().err, "before a model is looked for"
    assert main(["bench", "latency", "--no-view", "--profile", str(tmp_path / "t.json")]) != 0
    assert "--no-view" in capsys.readouterr().err
    assert main(["bench", "latency", "--device", "null", "--profile", str(tmp_path / "t.json")]) != 0
    assert "null device does none" in capsys.readouterr().err
