"""What ranks of a mesh have, send and keep: sums over ranks are the whole, and volumes are those of the papers."""

from __future__ import annotations

import json
import math
import pathlib
import random

import msgspec
import pytest
from planner_shapes import LLAMA_8B, SHAPES

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.config.parameters import shapes as parameter_shapes
from quire.config.resolve import resolve
from quire.config.stages import layer_range, stage_arch, stage_layers, stage_layout
from quire.core.errors import ConfigError
from quire.engine.capacity import equation, layout_of
from quire.planner.accelerators import ACCELERATORS, accelerator_named, calibration_for
from quire.planner.calibration import Ceilings, Curve, load_calibration
from quire.planner.captured import padded_rows
from quire.planner.communication import all_reduce_bytes, step_transfers, sum_transfer
from quire.planner.cost import calibrated
from quire.planner.formats import FORMATS, Formats, formats_named
from quire.planner.links import Links
from quire.planner.mesh import division_refusal, meshes
from quire.planner.operators import decode_spans, held_bytes, limit_s, prefill_spans, seen, step_operators
from quire.planner.parts import rank_parts
from quire.planner.placement import Limits, place
from quire.planner.timing import StepTimer

MIXTRAL = read_arch(SHAPES / "mixtral-8x7b")
DEEPSEEK = read_arch(SHAPES / "deepseek-v3")
H200 = accelerator_named("h200")
GIB = 1 << 30
COLLECTIVES = pathlib.Path(__file__).parents[3] / "benchmarks/results/h200"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "deepseek-v2-lite", "mamba2-2.7b"])
def test_a_rank_alone_keeps_every_parameter(name: str) -> None:
    arch = read_arch(SHAPES / name)
    wide = sum(math.prod(shape) for tensor, shape in parameter_shapes(arch) if tensor.endswith("float32"))
    kept = rank_parts(arch, Mesh(), Formats()).weights_bytes
    assert kept == pytest.approx(2 * arch.n_parameters + 2 * wide, rel=1e-3)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_matrices_of_all_ranks_are_the_whole(tp: int) -> None:
    whole, part = (rank_parts(LLAMA_8B, Mesh(tp=n), Formats()) for n in (1, tp))
    for one, own in zip(whole.products, part.products, strict=True):
        assert own.n_bytes * tp == one.n_bytes and own.flops(7) * tp == one.flops(7), one.name
    assert sum(group.token_numbers for group in part.attentions) * tp == 2 * 8 * 128


def test_experts_of_all_ranks_are_the_whole() -> None:
    whole, cut, divided = (rank_parts(MIXTRAL, mesh, Formats()) for mesh in (Mesh(), Mesh(tp=4), Mesh(tp=4, ep=4)))
    for parts in (cut, divided):
        pairs = [(a, b) for a, b in zip(whole.products, parts.products, strict=True) if a.is_experts]
        assert len(pairs) == 2
        for one, own in pairs:
            assert 4 * own.n_of * own.n_bytes == one.n_of * one.n_bytes
            assert 4 * own.flops(100) == pytest.approx(one.flops(100))
    assert {one.n_of for one in divided.products if one.is_experts} == {2}


@pytest.mark.parametrize("n", [4, 8])
def test_the_work_on_experts_is_the_same_in_every_mesh(n: int) -> None:
    """64 rows of all replicas together, whatever ranks they lie on: FLOPs over all ranks and stages."""
    spans, found = prefill_spans(64), {}
    (whole,) = {sum(one.n_times * one.flops(64) for one in rank_parts(MIXTRAL, Mesh(), Formats()).products
                    if one.is_experts)}  # fmt: skip
    for mesh in meshes(n, experts=True, sequences=True):
        if division_refusal(mesh, MIXTRAL):
            continue
        n_rows = sum(spans.lengths) / mesh.dp / mesh.sp
        own = sum(one.n_times * one.flops(n_rows) for one in rank_parts(MIXTRAL, mesh, Formats()).products
                  if one.is_experts)  # fmt: skip
        found[mesh.words] = own * mesh.n_ranks / mesh.pp
    assert len(found) > 10 and found == pytest.approx(dict.fromkeys(found, whole))


def test_experts_of_many_replicas_are_read_for_all_their_rows() -> None:
    alone, eight = (rank_parts(DEEPSEEK, mesh, Formats()) for mesh in (Mesh(), Mesh(dp=8, ep=8)))
    for one, own in zip(alone.products, eight.products, strict=True):
        if one.is_experts:
            assert 8 * own.read_bytes(4) == pytest.approx(one.read_bytes(32))


def test_a_matrix_with_scales() -> None:
    assert FORMATS["int4-g128"].n_bytes(64, 256) == 64 * 256 / 2 + 64 * 2 * 2
    assert FORMATS["int8"].n_bytes(64, 256) == 64 * 256 + 64 * 4
    assert Formats(kv="int8").kv_itemsize(128) == 1 + 4 / 128


def test_two_all_reduces_a_layer() -> None:
    """Shoeybi et al. 2019, figure 4; and one of the embedding, which is divided by rows."""
    parts = rank_parts(LLAMA_8B, Mesh(tp=4), Formats())
    reduce, logits = step_transfers(parts, Mesh(tp=4), 100, 100, 2)
    assert reduce.n_times == 2 * 32 + 1 and reduce.n_bytes == 2 * 3 / 4 * 100 * 4096 * 2
    assert logits.n_bytes == 3 * 100 * parts.head.n_out * 2


def test_the_last_layer_sums_only_rows_that_want_a_token() -> None:
    """As counted in a running engine by `benchmarks/rank_traffic.py`."""
    mesh = Mesh(tp=4)
    parts = rank_parts(LLAMA_8B, mesh, Formats())
    others, last, _ = step_transfers(parts, mesh, 100, 3, 2)
    assert (others.n_times, last.n_times) == (2 * 31 + 1, 2)
    assert others.n_bytes == 2 * 3 / 4 * 100 * 4096 * 2 and last.n_bytes == 2 * 3 / 4 * 3 * 4096 * 2
    timer = calibrated(LLAMA_8B, H200, mesh=mesh).timer
    alone = StepTimer(LLAMA_8B, timer.calibration, Formats(), mesh)
    spared_s = timer.spared_s(4000, 1) - alone.spared_s(4000, 1)
    sent_s = [timer.transfer_s(step_transfers(parts, mesh, n, n, 2)[0]) for n in (4000, 1)]
    assert spared_s == pytest.approx(2 * (sent_s[0] - sent_s[1]))


def test_shared_experts_are_reduced_with_the_others() -> None:
    (reduce, _) = step_transfers(rank_parts(DEEPSEEK, Mesh(tp=8), Formats()), Mesh(tp=8), 1, 1, 2)
    assert reduce.n_times == 2 * 61 + 1


def test_experts_are_sent_to_and_back() -> None:
    mesh = Mesh(dp=8, ep=8)
    parts, way = rank_parts(DEEPSEEK, mesh, Formats()), 2 * 7168 * 2 + 8 * 8
    few, many = ([one for one in step_transfers(parts, mesh, n, n, 2) if "ep" in one.name] for n in (4, 256))
    assert [one.name for one in few] == ["all-gather (ep)", "reduce-scatter (ep)"]
    assert [one.n_times for one in few] == [2 * 58, 58]
    assert sum(one.n_times * one.n_bytes for one in few) == pytest.approx(58 * 7 * 4 * way)
    counts, sent = many
    assert (counts.n_times, sent.name, sent.n_times) == (58, "all-to-all (ep)", 3 * 58)
    assert 3 * sent.n_bytes == pytest.approx(7 * (1 - (7 / 8) ** 8) * 256 * way, rel=0.02)


def test_experts_among_the_ranks_of_tp_are_reduced_as_without() -> None:
    """Their ranks have the same rows: nothing is sent to experts."""
    plain, apart = (step_transfers(rank_parts(DEEPSEEK, mesh, Formats()), mesh, 16, 16, 2)
                    for mesh in (Mesh(tp=8), Mesh(tp=8, ep=8)))  # fmt: skip
    assert plain == apart and not any("ep" in one.name for one in apart)


@pytest.mark.parametrize("arch", [MIXTRAL, DEEPSEEK])
def test_what_experts_of_all_ranks_made_is_summed_as_before(arch: ModelArch) -> None:
    """Each of the ranks that share a layer has a term of its rows, whoever computed it."""
    alone, sent = (step_transfers(rank_parts(arch, mesh, Formats()), mesh, 8, 8, 2)[0]
                   for mesh in (Mesh(tp=2), Mesh(tp=2, dp=4, ep=8)))  # fmt: skip
    assert alone == sent and alone.n_times == 2 * arch.n_layers + 1


def test_volumes() -> None:
    assert all_reduce_bytes(80.0, 4) == 120.0


def test_a_pipeline_sends_rows_between_stages() -> None:
    (sent,) = step_transfers(rank_parts(LLAMA_8B, Mesh(pp=4), Formats()), Mesh(pp=4), 10, 10, 2)
    assert sent.n_times == 3 and sent.n_bytes == 10 * 4096 * 2


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (Mesh(tp=3), "3 ranks cannot share equally"), (Mesh(ep=2, dp=2), "no experts"), (Mesh(pp=33), "33 stages"),
        (Mesh(sp=64), "heads among"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_says_why(mesh: Mesh, reason: str) -> None:
    assert reason in division_refusal(mesh, LLAMA_8B)


def test_all_meshes_are_looked_at() -> None:
    found = list(meshes(8, experts=True, sequences=False))
    assert len(set(found)) == len(found) and all(one.n_ranks == 8 for one in found)
    assert Mesh(tp=2, pp=2, dp=2, ep=4) in found and Mesh(tp=8) in found


def test_windows_are_seen() -> None:
    assert seen([100], [1], 0).n_read == 101 and seen([100], [1], 10).n_read == 10
    assert seen([0], [20], 8).n_pairs == sum(min(i + 1, 8) for i in range(20))


def test_a_model_that_does_not_fit_says_what_lacks() -> None:
    placement = place(MIXTRAL, 80 * GIB, Mesh(), Formats(), Limits())
    assert not placement.fits and placement.lacking_bytes > 2 * MIXTRAL.n_parameters - 80 * GIB * 0.9
    assert place(MIXTRAL, 80 * GIB, Mesh(tp=2), Formats(), Limits()).fits


def test_as_many_sequences_as_pages_hold() -> None:
    placement = place(LLAMA_8B, 40 * GIB, Mesh(), Formats(), Limits(max_model_len=4096))
    n = placement.seqs_within(4096)
    assert 0 < n < 1024
    assert n * placement.equation.seq_pages(4096) <= placement.n_pages < (n + 1) * placement.equation.seq_pages(4096)
    assert placement.seqs_within(4096, n_shared=2048) > 1.9 * n


@pytest.mark.parametrize(
    ("arch", "mesh", "share"),
    [
        (LLAMA_8B, Mesh(sp=2), 1 / 2), (LLAMA_8B, Mesh(tp=4, sp=2), 1 / 8), (LLAMA_8B, Mesh(tp=4, sp=4), 1 / 8),
        (LLAMA_8B, Mesh(tp=16), 1 / 8), (LLAMA_8B, Mesh(sp=16), 1 / 8), (DEEPSEEK, Mesh(sp=8), 1.0),
        (DEEPSEEK, Mesh(tp=4, sp=2), 1.0), (DEEPSEEK, Mesh(ring=8), 1 / 8), (LLAMA_8B, Mesh(ring=16), 1 / 16),
    ],
)  # fmt: skip
def test_heads_of_keys_are_whole_and_lines_are_not_divided(arch: ModelArch, mesh: Mesh, share: float) -> None:
    whole, own = (rank_parts(arch, one, Formats()).attentions for one in (Mesh(), mesh))
    assert [one.token_numbers for one in own] == [share * one.token_numbers for one in whole]
    alone, shared = (place(arch, 80 * GIB, one, Formats(), Limits()).equation for one in (Mesh(), mesh))
    assert shared.page_bytes / shared.page_size == share * alone.page_bytes / alone.page_size


def test_stages_share_the_layers() -> None:
    """A quarter of the layers, and in the fullest stage the head with its norm; between the ends come the rest."""
    whole, stage = (place(LLAMA_8B, 40 * GIB, Mesh(pp=n), Formats(), Limits()) for n in (1, 4))
    table, norm = 2 * 128256 * 4096, 2 * 4096
    assert stage.weights_bytes == (whole.weights_bytes - 2 * table - norm) // 4 + table + norm
    assert stage.page_bytes * 4 == whole.page_bytes
    assert [len(one) for one in stage_layers(61, 4)] == [15, 16, 15, 15]
    assert [len(one) for one in stage_layers(11, 4)] == [3, 3, 3, 2] and len(stage_layers(5, 2)[0]) == 3


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["gemma-2-9b", "gemma-3-1b", "llama-3.1-8b"])
def test_pages_of_stages_are_those_that_an_engine_has(name: str, n_stages: int) -> None:
    """Groups dealt out to stages, and tokens of as many steps in flight as these need."""
    arch, config = read_arch(SHAPES / name), EngineConfig(pipeline_parallel_size=n_stages, max_model_len=8192)
    planned = place(arch, 80 * GIB, Mesh(pp=n_stages), Formats(), Limits(max_model_len=8192)).equation
    limits = resolve(config, arch, "cuda")
    layout, found = layout_of(config, limits, arch), []
    for stage in range(n_stages):
        layers = layer_range(arch, stage, n_stages, "")
        found.append(equation(config, limits, stage_arch(arch, layers), kv=stage_layout(layout, layers)))
    assert (planned.page_bytes, planned.layout) in [(one.page_bytes, one.layout) for one in found]
    assert planned.page_bytes == max(one.page_bytes for one in found)
    assert (planned.in_flight, planned.prompt_in_flight) == (found[0].in_flight, found[0].prompt_in_flight)
    for n in (100, 4096, 8192):
        assert planned.seq_pages(n) == found[0].seq_pages(n) and planned.prompt_pages(n) == found[0].prompt_pages(n)


def test_a_stage_of_experts_has_its_own_layers_and_not_the_mean() -> None:
    """671B in 4 stages: the first has the three dense layers and the embedding, the second one layer more."""
    placed = place(DEEPSEEK, 2000 * GIB, Mesh(pp=4), Formats(), Limits())
    stages = [
        msgspec.structs.replace(DEEPSEEK, layers=DEEPSEEK.layers[layers.start : layers.stop])
        for layers in stage_layers(DEEPSEEK.n_layers, 4)
    ]
    tables = 2 * 129280 * 7168
    sizes = [2 * (one.n_parameters - tables - 7168) for one in stages]
    assert sizes[0] < 0.9 * sizes[1] and placed.weights_bytes == pytest.approx(max(sizes), rel=1e-3)
    assert placed.weights_bytes > 1.03 * sum(sizes) / 4


def test_steps_are_never_faster_than_the_limit_of_the_peaks() -> None:
    """Of every accelerator: with what it publishes, not with what was measured."""
    for device in ACCELERATORS.values():
        cost, rates = calibrated(LLAMA_8B, device), device.flops_per_s
        peaks = Ceilings(device="peaks", read_bytes_per_s=device.bandwidth_bytes_per_s, flops_per_s=rates)
        for spans in (decode_spans(1, 100), decode_spans(64, 2000), prefill_spans(2048)):
            limit = limit_s(step_operators(LLAMA_8B, spans), peaks)
            assert cost.step_s(spans) > 0.9 * limit, device.name


def test_more_work_takes_longer() -> None:
    cost = calibrated(LLAMA_8B, H200)
    assert cost.step_s(decode_spans(8, 1000)) < cost.step_s(decode_spans(8, 4000)) < cost.step_s(decode_spans(9, 4000))
    half = calibrated(LLAMA_8B, H200, formats=formats_named("fp8"))
    assert half.step_s(decode_spans(1, 10)) < 0.7 * cost.step_s(decode_spans(1, 10))
    two = calibrated(LLAMA_8B, H200, mesh=Mesh(tp=2))
    assert 0.5 < two.step_s(decode_spans(1, 10)) / cost.step_s(decode_spans(1, 10)) < 0.9


def test_a_shared_prefix_is_cheaper_than_apart() -> None:
    cost, spans = calibrated(LLAMA_8B, H200), decode_spans(512, 2100)
    assert cost.step_s(spans, [(spans.slots, 128)]) < 0.6 * cost.step_s(spans)


def test_parts_are_the_step() -> None:
    timer = StepTimer(LLAMA_8B, calibration_for(H200), Formats(), Mesh())
    for spans in (decode_spans(5, 300), prefill_spans(700)):
        assert sum(timer.parts_s(spans).values()) == pytest.approx(timer.step_s(spans))


def test_logits_that_ranks_send_take_time() -> None:
    links = H200.links
    timer = StepTimer(LLAMA_8B, calibration_for(H200), Formats(), Mesh(tp=4), links)
    spans = decode_spans(256, 300)
    (_, logits) = step_transfers(timer.parts, Mesh(tp=4), 256, 256, 2)
    sent_s = timer.transfer_s(logits)
    assert sent_s > logits.n_bytes / links.device_bytes_per_s
    head_s = timer.product_s(timer.parts.head, 256)
    assert timer.wants_s(256) == pytest.approx(head_s + sent_s + 256 * timer.calibration.row_s)
    assert timer.wants_s(0) == 0 and "logits (tp)" not in dict(timer.row_parts_s(256))
    assert sum(timer.parts_s(spans).values()) == pytest.approx(timer.step_s(spans))


def test_steps_are_padded_to_captured_sizes() -> None:
    assert [padded_rows(n, 1024) for n in (1, 3, 65, 257, 1000, 5000)] == [1, 4, 80, 288, 1024, 5000]


def test_a_curve_between_its_knots() -> None:
    curve = Curve(rows=(1, 4, 16), fixed_s=(1.0, 3.0, 4.0), flops_share=(0.5,), tile=8)
    assert [curve.fixed(n) for n in (1, 2, 4, 16, 99)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert [curve.multiplied(n) for n in (9, 16, 17, 24)] == [9, 16, 24, 24] and curve.rate_share(7) == 0.5


def test_rows_of_experts_fill_tiles() -> None:
    """Against tiles counted over drawn rows; equally many fill whole tiles."""
    curve = Curve(tiles=((0, 16), (10, 64), (40, 128)))
    assert Curve().padding(7, are_equal=False) == 1.0
    assert [curve.padding(n, are_equal=True) * n for n in (0.5, 1, 16, 39, 40, 129)] == [8, 16, 64, 64, 128, 256]
    rng, n_experts = random.Random(3), 1024
    for n_rows, tile in ((0.5, 16), (5, 16), (30, 64), (100, 128), (128, 128), (700, 128)):
        counts = [0] * n_experts
        for _ in range(round(n_rows * n_experts)):
            counts[rng.randrange(n_experts)] += 1
        tiles = sum(-(-count // tile) for count in counts)
        found = curve.padding(n_rows, are_equal=False) * n_rows * n_experts / tile
        assert found == pytest.approx(tiles, rel=0.04), n_rows


def test_a_bad_calibration_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.json"
    for text, match in (("{", "c.json"), ('{"device": 3}', "device"), ('{"nothing": 1}', "nothing")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_calibration(path)


def test_every_operator_has_a_kind_and_work() -> None:
    for name in ("deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "gemma-3-1b"):
        for one in step_operators(read_arch(SHAPES / name), decode_spans(4, 500), Mesh(tp=1)):
            assert one.n_times > 0 and one.n_bytes > 0, (name, one.name)


def test_what_ranks_that_share_tokens_send() -> None:
    """32 query heads and 8 of keys and values, of 128, on 4 ranks, 2,048 rows each; and steps of few rows."""
    ulysses, ring = (rank_parts(LLAMA_8B, mesh, Formats()) for mesh in (Mesh(sp=4), Mesh(ring=4)))
    (sent,) = [one for one in step_transfers(ulysses, Mesh(sp=4), 8192, 0, 2) if "sp" in one.name]
    assert sent.n_times == 2 * 32 and sent.n_times * sent.n_bytes == 32 * 3 * 2048 * (8 + 2 * 2 + 8) * 128 * 2
    (sent,) = [one for one in step_transfers(ring, Mesh(ring=4), 8192, 0, 2) if "ring" in one.name]
    assert sent.n_times == 2 * 3 * 32 and sent.n_times * sent.n_bytes == 32 * 3 * 2048 * 32 * (2 * 128 * 2 + 4)
    both = Mesh(sp=2, ring=2)
    heads, turns = step_transfers(rank_parts(LLAMA_8B, both, Formats()), both, 8192, 0, 2)
    assert heads.n_times * heads.n_bytes == 32 * 2048 * (16 + 2 * 4 + 16) * 128 * 2
    assert turns.n_times * turns.n_bytes == 32 * 4096 * 16 * (2 * 128 * 2 + 4)
    (sent,) = step_transfers(ulysses, Mesh(sp=4), 64, 0, 2)
    assert sent.n_times == 32 and sent.n_bytes == 3 * 64 * 8 * 128 * 2


def test_keys_go_round_where_they_are_fewer_bytes_and_behind_attention() -> None:
    """8 heads of keys and values to 32 of queries: keys go round up to a past of about 33,000 tokens."""
    mesh, n = Mesh(ring=4), 8192
    parts, two = rank_parts(LLAMA_8B, mesh, Formats()), 2 * 8 * 128 * 2
    queries = 3 * (n // 4) * 32 * (2 * 128 * 2 + 4)
    for start, expected in ((0, 3 * n // 4 * two), (16384, 3 * (16384 + n) // 4 * two), (40000, queries)):
        held = held_bytes(parts, prefill_spans(n, start), Formats())
        (sent,) = [one for one in step_transfers(parts, mesh, n, 0, 2, held) if "ring" in one.name]
        assert sent.n_times * sent.n_bytes == 32 * expected
    timer = calibrated(LLAMA_8B, H200, mesh=mesh).timer
    assert timer.transfer_s(sent) < 2 * sent.n_bytes / H200.links.bytes_per_s(4), "they lie in one host"
    ways = (Links(device_bytes_per_s=1e9), None)
    slow, none = (StepTimer(LLAMA_8B, timer.calibration, Formats(), mesh, links) for links in ways)
    spans = prefill_spans(n)
    without_s, behind_s = none.step_s(spans), none.attention_s(spans) * 3 / 4
    assert timer.step_s(spans) == pytest.approx(without_s), "attention takes longer than the sending"
    (sent,) = step_transfers(parts, mesh, n, 0, 2, held_bytes(parts, spans, Formats()))
    assert slow.step_s(spans) == pytest.approx(without_s + sent.n_times * slow.transfer_s(sent) - behind_s)


def test_the_last_layer_spares_the_rows_of_one_rank() -> None:
    """Of 8,192 rows one of four ranks has 2,048."""
    one, four = (calibrated(LLAMA_8B, H200, mesh=mesh).timer for mesh in (Mesh(), Mesh(sp=4)))
    assert four.spared_s(8192, 1) == one.spared_s(2048, 1) < one.spared_s(8192, 1) / 3


@pytest.mark.parametrize("n_ranks, limit", [(4, 0.12), (2, 0.2)])
def test_sums_take_what_was_measured_on_gpus(n_ranks: int, limit: float) -> None:
    """Microseconds by the way that the engine takes. Two ranks' shortest sums differ by a fifth from run to run."""
    mesh = Mesh(tp=n_ranks)
    timer = calibrated(LLAMA_8B, H200, mesh=mesh).timer
    report = json.loads((COLLECTIVES / f"collectives_{n_ranks}xh200.json").read_text())
    measured = {row["kib"]: row["ours"] for row in report["microseconds"]}
    found = {kib: 1e6 * timer.transfer_s(sum_transfer(timer.parts, mesh, 1, kib / 8, 2)) for kib in measured}
    assert found == pytest.approx(measured, rel=limit) and max(measured) == 65536, "above 16 MiB, too"


def test_what_is_no_sum_or_leaves_the_host_goes_through_nccl() -> None:
    """As it was for all, with NCCL's latency."""
    timer = calibrated(LLAMA_8B, H200, mesh=Mesh(tp=2)).timer
    summed, gathered = step_transfers(timer.parts, Mesh(tp=2), 1, 1, 2)
    links = H200.links
    assert timer.transfer_s(summed) < links.latency_s
    assert timer.transfer_s(gathered) == pytest.approx(links.latency_s + gathered.n_bytes / links.bytes_per_s(2))
    far = StepTimer(LLAMA_8B, timer.calibration, Formats(), Mesh(tp=2), msgspec.structs.replace(links, n_in_host=1))
    assert far.transfer_s(summed) > links.latency_s


def test_ranks_that_share_tokens_hold_longer_sequences() -> None:
    """Weights stay whole, so four ranks hold more than four times as much beside them."""
    limits = Limits(max_num_seqs=8)
    alone, ulysses, ring = (place(LLAMA_8B, 40 * GIB, mesh, Formats(), limits).longest
                            for mesh in (Mesh(), Mesh(sp=4), Mesh(ring=4)))  # fmt: skip
    assert 3.9 * alone < ulysses < 4.3 * alone and 3.9 * alone < ring < 4.3 * alone


def test_queries_and_lines_of_a_latent_layer_are_one_product_where_both_are_floating() -> None:
    """A model that makes its queries of a smaller vector joins nothing."""
    for name, weights, n_calls in (
        ("deepseek-v2-lite", "bfloat16", 0),
        ("deepseek-v2-lite", "fp8", 1),
        ("deepseek-v3", "bfloat16", 1),
    ):
        parts = rank_parts(read_arch(SHAPES / name), Mesh(), formats_named(weights))
        assert {one.n_calls for one in parts.products if one.name == "latent a"} == {n_calls}, (name, weights)
