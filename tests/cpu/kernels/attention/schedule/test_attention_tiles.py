"""The GPU work list: every row meets every key once, partial results are joined in order, CTAs get equal shares."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from quire.kernels import native
from quire.kernels.attention.schedule import decode as short_way
from quire.kernels.attention.schedule import large, stream, work
from quire.kernels.attention.schedule.pieces import WorkList
from quire.kernels.attention.schedule.plan import AttnPlan, AttnSpans, Heads, Layout, SharedPrefix
from quire.kernels.attention.schedule.tiles import cut, cut_any, large_tokens_of, small_rows_of

Range = tuple[int, int]


@dataclasses.dataclass
class Meeting:
    """A row and KV head meet keys begin .. end - 1; the packed row of the partial result, or -1."""

    begin: int
    end: int
    partial: int


def plan_of(lengths: list[int], kv_lens: list[int], heads: Heads, **options: object) -> AttnPlan:
    """Pages of 16 tokens, spans in falling slots."""
    spans = AttnSpans(
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        np.array(kv_lens, np.int32),
        np.arange(len(lengths), dtype=np.int32)[::-1].copy(),
    )
    table = torch.zeros(max(1, len(lengths)), 4400, dtype=torch.int32)
    return AttnPlan(Layout.PAGED, heads, 16, spans, table, **options)


def decode(kv_lens: list[int], n_kv_heads: int = 8, **options: object) -> AttnPlan:
    return plan_of([1] * len(kv_lens), kv_lens, Heads(4 * n_kv_heads, n_kv_heads, 128), **options)


def sparse(plan: AttnPlan, rng: np.random.Generator) -> AttnPlan:
    """The same spans with a random list of pages each."""
    lists = []
    for kv_len in plan.spans.kv_lens.tolist():
        n_pages = -(-kv_len // plan.page_size)
        lists.append(np.flatnonzero(rng.random(n_pages) < rng.choice([0.0, 0.1, 0.7, 1.0])).astype(np.int32))
    indptr = np.concatenate(([0], np.cumsum([len(pages) for pages in lists]))).astype(np.int32)
    blocks = np.concatenate([*lists, np.zeros(0, np.int32)])
    spans = dataclasses.replace(plan.spans, block_indptr=indptr, blocks=blocks)
    return dataclasses.replace(plan, layout=Layout.SPARSE, spans=spans)


def random_plan(seed: int) -> AttnPlan:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 18))
    lengths = rng.choice([0, 1, 1, 1, 1, 1, 2, 3, 16, 40, 130], n)
    before = rng.choice([0, 5, 100, 128, 700, 3000, 20000, 69000], n)
    heads = int(rng.choice([1, 2, 3, 4, 8, 16], p=[0.2, 0.2, 0.2, 0.2, 0.15, 0.05]))
    options: dict[str, object] = {"causal": bool(rng.random() < 0.8), "batch_invariant": bool(rng.random() < 0.2)}
    if rng.random() < 0.4:
        options["window"] = int(rng.choice([1, 60, 128, 1000, 5000]))
        options["n_first"] = int(rng.choice([0, 0, 4, 70, 300]))
    elif n > 3 and rng.random() < 0.6:
        members = [span for span in rng.permutation(n).tolist() if before[span] or not lengths[span]]
        half = len(members) // 2
        groups = [group for group in (members[:half], members[half:]) if group]
        options["shared"] = [SharedPrefix(group, int(before[group].min()) // 16 * 16) for group in groups]
    group = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 71]))
    plan = plan_of(lengths.tolist(), (lengths + before).tolist(), Heads(group * heads, heads, 64), **options)
    return sparse(plan, rng) if rng.random() < 0.2 else plan


def meetings(plan: AttnPlan, made: WorkList) -> dict[Range, list[Meeting]]:
    """(row, KV head) → its lines, in the order of keys. What a kernel does with each line, one row after another."""
    group, found = plan.heads.group, defaultdict(list)
    position = {}
    for span in range(len(plan.spans.kv_lens)):
        for row in range(int(plan.spans.q_indptr[span]), int(plan.spans.q_indptr[span + 1])):
            position[row] = int(plan.spans.kv_lens[span]) - (int(plan.spans.q_indptr[span + 1]) - row)
    every = list(range(plan.heads.n_kv_heads))
    work_lines = [(line, every) for line in made.large.tolist()] + [(line, [line[8]]) for line in made.small.tolist()]
    for line, heads in work_lines:
        first, n_tokens, at, begin, end, _, _, partial, _, gathered = line[:10]
        assert n_tokens > 0
        for order, head in enumerate(heads):
            for token in range(n_tokens):
                row, stands = made.rows[first + token].tolist() if gathered else (first + token, at + token)
                assert stands == position[row]
                packed = partial + (order * n_tokens + token) * group if partial >= 0 else -1
                found[row, head].append(Meeting(begin, end, packed))
    return {key: sorted(some, key=lambda meeting: meeting.begin) for key, some in found.items()}


def visible(plan: AttnPlan, span: int, position: int) -> list[Range]:
    """Ranges of keys that must be read for a row, by their index in the span's list."""
    kv_len = int(plan.spans.kv_lens[span])
    if plan.layout is Layout.SPARSE:
        pages = plan.spans.blocks[plan.spans.block_indptr[span] : plan.spans.block_indptr[span + 1]]
        return [(0, sum(min(plan.page_size, kv_len - int(page) * plan.page_size) for page in pages))]
    last = position if plan.causal else kv_len - 1
    if not plan.window:
        return [(0, last + 1)]
    lower = max(0, position - plan.window + 1)
    return [(0, min(plan.n_first, lower)), (lower, last + 1)]


def check_coverage(plan: AttnPlan, found: dict[Range, list[Meeting]]) -> None:
    """No key twice, none beyond the span's keys, and all that a row may see."""
    spans = plan.spans
    rows = int(spans.q_indptr[-1])
    assert sorted(found) == [(row, head) for row in range(rows) for head in range(plan.heads.n_kv_heads)]
    for span in range(len(spans.kv_lens)):
        for row in range(int(spans.q_indptr[span]), int(spans.q_indptr[span + 1])):
            position = int(spans.kv_lens[span]) - (int(spans.q_indptr[span + 1]) - row)
            wanted = visible(plan, span, position)
            limit = wanted[0][1] if plan.layout is Layout.SPARSE else int(spans.kv_lens[span])
            for head in range(plan.heads.n_kv_heads):
                some = found[row, head]
                assert all(one.end <= other.begin for one, other in itertools.pairwise(some))
                assert some[-1].end <= limit
                for begin, end in wanted:
                    met = sum(max(0, min(end, one.end) - max(begin, one.begin)) for one in some)
                    assert met == max(0, end - begin)


def check_parts(plan: AttnPlan, made: WorkList, found: dict[Range, list[Meeting]]) -> None:
    """Partial rows never overlap, and each token that has some is merged once, in the order of keys."""
    group, n_lines = plan.heads.group, defaultdict(list)
    written = [one.partial + i for some in found.values() for one in some if one.partial >= 0 for i in range(group)]
    assert sorted(written) == list(range(made.n_partial_rows))
    for row, head, at, count in made.merges.tolist():
        n_lines[row, head].append(made.parts[at : at + count].tolist())
    wanted = {key: [[one.partial for one in some]] for key, some in found.items() if some[0].partial >= 0}
    assert dict(n_lines) == wanted
    assert sum(made.merges[:, 3]) == len(made.parts)
    for some in found.values():
        assert all(one.partial >= 0 for one in some) if len(some) > 1 else True


def check_shapes(plan: AttnPlan, made: WorkList, n_ctas: int) -> None:
    """Sizes of lines, where they are cut, and the queue."""
    group = plan.heads.group
    assert (made.small[:, 1] * group <= small_rows_of(group)).all()
    assert (made.large[:, 1] <= large_tokens_of(group)).all()
    assert len(made.queue) == n_ctas + 1
    assert made.queue[0] == 0
    assert made.queue[-1] == len(made.small)
    assert (np.diff(made.queue) >= 0).all()
    for lines, step in ((made.small, 64), (made.large, 128)):
        assert (lines[:, 3] % step == 0).all()
        assert lines.dtype == np.int32
    stride = 1 if plan.page_table is None else plan.page_table.stride(0)
    for line in made.small.tolist() + made.large.tolist():
        row = int(made.rows[line[0], 0]) if line[9] else line[0]
        span = int(np.searchsorted(plan.spans.q_indptr, row, side="right")) - 1
        assert line[9] or line[5] == int(plan.spans.kv_at[span]) * stride
        assert plan.layout is not Layout.SPARSE or line[6] == plan.spans.block_indptr[span]


@pytest.mark.parametrize("seed", range(100))
def test_every_row_meets_every_key_once(seed: int) -> None:
    plan = random_plan(seed)
    n_ctas = (1, 7, 132)[seed % 3]
    made = cut(plan, n_ctas)
    found = meetings(plan, made)
    check_coverage(plan, found)
    check_parts(plan, made, found)
    check_shapes(plan, made, n_ctas)


def test_ragged_keys_begin_at_their_row() -> None:
    plan = dataclasses.replace(plan_of([1, 200], [5000, 200], Heads(8, 2, 64)), layout=Layout.RAGGED, page_table=None)
    spans = dataclasses.replace(plan.spans, kv_at=np.array([70, 9000], np.int32))
    made = cut(dataclasses.replace(plan, spans=spans), 132)
    assert set(made.small[:, 5]) == {70}
    assert set(made.large[:, 5]) == {9000}


def loads(made: WorkList) -> np.ndarray:
    """Cost of each CTA's small lines."""
    cost = np.concatenate(([0], np.cumsum(made.small[:, 4] - made.small[:, 3] + stream.TILE_COST)))
    return np.diff(cost[made.queue])


@pytest.mark.parametrize("seed", range(40))
def test_ctas_have_equal_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_lens = (rng.pareto(1, int(rng.integers(1, 80))) * 300 + 1).clip(max=70_000).astype(int).tolist()
    made = cut(decode(kv_lens, int(rng.choice([1, 2, 8])), batch_invariant=seed % 4 == 0), 132)
    load = loads(made)
    piece = stream.INVARIANT_KEYS if seed % 4 == 0 else stream.SHORTEST_SHARE
    assert load.max() <= load.mean() + piece + 2 * stream.TILE_COST
    if seed % 4:
        split = made.small[made.small[:, 7] >= 0]
        assert (split[:, 4] - split[:, 3] > stream.SHORTEST - stream.KEYS).all()


@pytest.mark.parametrize("seed", range(40))
def test_the_short_way_for_decode_gives_the_same_work(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_lens = (rng.pareto(1, int(rng.integers(1, 300))) * 10 ** rng.integers(1, 4) + 1).clip(max=70_000).astype(int)
    window = int(rng.choice([1, 64, 100, 4096])) if seed % 2 else 0
    plan = decode(kv_lens.tolist(), int(rng.choice([1, 2, 8])), window=window)
    assert short_way.fits(plan, shares=True)
    short, wanted = cut(plan, 132), cut_any(plan, 132)
    for name in (field.name for field in dataclasses.fields(WorkList)):
        np.testing.assert_array_equal(getattr(short, name), getattr(wanted, name), name, strict=True)


def test_the_long_way_does_it_without_a_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = decode([700, 30], 2)
    wanted = cut(plan, 132)
    monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(cut(plan, 132).small, wanted.small)


def test_the_short_way_is_for_whole_rows_of_pages_only() -> None:
    assert not short_way.fits(plan_of([1, 0, 2], [5, 5, 5], Heads(8, 2, 64)), shares=True)
    assert not short_way.fits(plan_of([], [], Heads(8, 2, 64)), shares=True)
    for options in ({"window": 3, "n_first": 1}, {"causal": False}, {"batch_invariant": True}):
        assert not short_way.fits(decode([700, 30], **options), shares=True), options
    shared = decode([700, 300], shared=[SharedPrefix([0, 1], 128)])
    assert short_way.fits(shared, shares=False) and not short_way.fits(shared, shares=True)
    assert not short_way.fits(sparse(decode([700, 30]), np.random.default_rng(0)), shares=True)


def test_one_long_sequence_fills_the_chip() -> None:
    made = cut(decode([16384]), 132)
    assert len(made.small) == 128
    assert set(np.diff(made.queue)[:128]) == {1}
    made = cut(decode([128 * 1024] + [4096] * 31), 132)
    assert loads(made).max() <= 1.02 * loads(made).mean()


def test_few_keys_are_not_cut_finer_than_merging_is_worth() -> None:
    made = cut(decode([1024]), 132)
    assert (made.small[:, 4] - made.small[:, 3] == stream.SHORTEST).all()
    assert len(cut(decode([60] * 16), 132).merges) == 0


def large_cost(made: WorkList) -> np.ndarray:
    return -(-(made.large[:, 4] - made.large[:, 3]) // large.KEYS)


def test_prefill_is_split_only_when_the_chip_would_idle() -> None:
    heads = Heads(32, 8, 128)
    for n_tokens in (512, 1024, 4096):
        made = cut(plan_of([n_tokens], [n_tokens], heads), 132)
        assert len(made.large) == n_tokens // 32
        assert len(made.merges) == 0
        assert (np.diff(large_cost(made)) <= 0).all()
    made = cut(plan_of([128], [8192], heads), 132)
    assert 100 <= len(made.large) * 8 <= 132 * 2
    assert large_cost(made).max() <= 22
    made = cut(plan_of([1024, 33], [1024, 65536], heads), 132)
    assert large_cost(made).max() <= 64, "the few tokens with many keys end long after the others"


def test_shared_prefix_is_read_once_and_only_if_that_pays() -> None:
    spans = range(32)
    made = cut(decode([4096 + 50] * 32, shared=[SharedPrefix(spans, 4096)]), 132)
    assert made.large[:, 1].max() == 32
    assert made.large[:, 9].all()
    assert sum(made.large[:, 4] - made.large[:, 3]) == 4096
    assert len(made.large) * 8 > 100
    assert (made.small[:, 3] == 4096).all()
    assert len(made.merges) == 32 * 8
    few = cut(decode([32768 + 50] * 3, shared=[SharedPrefix(range(3), 32768)]), 132)
    assert len(few.large) == 0
    assert few.small[:, 9].any()
    assert len(cut(decode([130] * 32, shared=[SharedPrefix(spans, 128)]), 132).merges) == 0
    windowed = cut(decode([4096] * 32, shared=[SharedPrefix(spans, 4080)], window=300), 132)
    assert len(windowed.rows) == 0


def pieces(plan: AttnPlan, made: WorkList, span: int) -> list[list[int]]:
    """Lines of a span, without what depends on its place in the step."""
    first = int(plan.spans.q_indptr[span])
    rows = range(first, int(plan.spans.q_indptr[span + 1]))
    lines = [line for line in made.small.tolist() + made.large.tolist() if line[0] in rows]
    return sorted([line[0] - first, *line[1:5], line[7] >= 0, line[8]] for line in lines)


@pytest.mark.parametrize("window", [0, 3000])
def test_batch_invariant_cuts_ignore_the_neighbours(window: int) -> None:
    lengths, kv_lens = [1, 1, 4, 300, 1], [70000, 1, 5000, 20000, 2048]
    options = {"batch_invariant": True, "window": window, "n_first": 4 if window else 0}
    heads = Heads(8, 2, 64)
    together = plan_of(lengths, kv_lens, heads, **options)
    made = cut(together, 132)
    for span, (length, kv_len) in enumerate(zip(lengths, kv_lens, strict=True)):
        alone = plan_of([length], [kv_len], heads, **options)
        assert pieces(together, made, span) == pieces(alone, cut(alone, 132), 0)
    assert made.merges[:, 3].max() == (35 if not window else 2)


def test_batch_invariant_lines_go_to_the_least_loaded_cta() -> None:
    made = cut(decode([24 * stream.INVARIANT_KEYS] + [64] * 400, 1, batch_invariant=True), 16)
    assert loads(made).max() <= 1.03 * loads(made).mean()


def test_a_cut_between_leading_positions_and_window_skips_what_no_row_sees() -> None:
    made = cut(decode([70_000], 1, batch_invariant=True, window=3000, n_first=2048), 16)
    assert sorted(map(tuple, made.small[:, 3:5].tolist())) == [(0, 2048), (66944, 68992), (68992, 70000)]


def test_work_holds_the_list_and_its_launch_sizes() -> None:
    plan = plan_of([1, 1, 700], [9000, 30, 700], Heads(16, 4, 64))
    made, sent = cut(plan, 8), work.make(plan, n_ctas=8)
    for name in work.ARRAYS:
        assert np.array_equal(getattr(sent, name).numpy(), getattr(made, name))
    assert (sent.n_small, sent.n_large, sent.n_merges) == (len(made.small), len(made.large), len(made.merges))
    assert sent.partial_out.shape == (made.n_partial_rows, 64)
    assert (sent.small_rows, sent.n_tokens_large, sent.ticket.tolist()) == (8, 32, [0])
    assert work.make(plan).n_ctas == 132


def test_buffers_keep_addresses_and_hold_any_mix() -> None:
    rng = np.random.default_rng(0)
    for invariant in (False, True):
        buffers = work.Buffers(decode([1], batch_invariant=invariant), 64, 40, 132)
        first = buffers.work
        addresses = [getattr(first, name).data_ptr() for name in work.ARRAYS]
        for n in rng.integers(0, 65, 20).tolist():
            kv_lens = (rng.pareto(1, n) * 300 + 600).clip(max=16_000).astype(int).tolist()
            plan = decode(kv_lens, shared=[SharedPrefix(range(n), 512)], batch_invariant=invariant)
            filled, made = buffers.fill(plan), cut(plan, 132, 40)
            assert filled is first
            assert [getattr(filled, name).data_ptr() for name in work.ARRAYS] == addresses
            for name in work.ARRAYS:
                array = getattr(made, name)
                assert np.array_equal(getattr(filled, name)[: len(array)].numpy(), array)
                assert name not in work.ZEROED or not getattr(filled, name)[len(array) :].any()
            assert filled.queue.max() == len(made.small), "no small line behind the last is run"
            assert made.n_partial_rows <= len(filled.partial_out)
            assert filled.ticket.tolist() == [0]


def test_buffers_name_what_does_not_fit() -> None:
    buffers = work.Buffers(decode([1]), 4, 0, 132, span_tokens=1)
    assert buffers.work.small_rows == 8
    with pytest.raises(ValueError, match="600 spans with 600 rows need 4800 small, but buffers for 4 spans"):
        buffers.fill(decode([10] * 600))
    with pytest.raises(ValueError, match=r"1 spans with 20 rows need 1 large, .* hold 0"):
        buffers.fill(plan_of([20], [20], Heads(32, 8, 128)))
    with pytest.raises(ValueError, match=r"need 2 tokens of a small line, .* hold 1"):
        buffers.fill(plan_of([2], [20], Heads(32, 8, 128)))
    with pytest.raises(ValueError, match=r"n_q_heads=32.* this one has .*n_q_heads=64"):
        buffers.fill(plan_of([1], [20], Heads(64, 8, 128)))


def test_buffers_for_one_token_a_span_share_prefixes() -> None:
    buffers = work.Buffers(decode([1]), 64, 32, 132, span_tokens=1, max_rows=64)
    assert buffers.work.n_merges == 64 * 8
    for n in (2, 3, 20, 64):
        plan = decode([9000] * n, shared=[SharedPrefix(range(n), 8000)])
        assert len(cut(plan, 132, 32).rows) == n
        assert int((buffers.fill(plan).merges[:, 3] > 0).sum()) == 8 * n


def test_lists_of_lines_are_aligned_for_wide_reads() -> None:
    """CUDA kernels read lines and merges four integers at a time, rows two at a time."""
    plan = plan_of([1, 1, 300], [5000, 77, 900], Heads(12, 3, 64))
    buffers = work.Buffers(plan, 5, 67, 131, max_rows=401, max_blocks=3)
    for lists in (work.make(plan, n_ctas=131), buffers.fill(plan)):
        start = lists.small.data_ptr()
        assert (lists.large.data_ptr() - start) % 16 == (lists.merges.data_ptr() - start) % 16 == 0
        assert (lists.rows.data_ptr() - start) % 8 == 0
        assert lists.n_small and lists.n_large and lists.n_merges


@pytest.mark.parametrize("seed", range(6))
def test_entries_that_large_lines_read(seed: int) -> None:
    """The pages of every key of every large line, each place of the table once; none where rows must be alone."""
    rng = np.random.default_rng(seed)
    kv_lens = rng.integers(200, 2000, 5).tolist()
    lengths = [int(rng.integers(40, n + 1)) for n in kv_lens]
    shared = [SharedPrefix(range(2), min(kv_lens[i] - lengths[i] for i in range(2)) // 16 * 16)]
    plan = plan_of(lengths, kv_lens, Heads(8, 2, 64), window=0 if seed % 2 else 150, shared=() if seed < 2 else shared)
    made = work.make(plan, n_ctas=20)
    wanted, n_pairs = set[int](), 0
    for line in made.large.tolist():
        begin, end, kv_at = line[3:6]
        wanted |= {kv_at + page for page in range(begin // 16, -(-end // 16))}
        n_pairs += line[1] * (end - begin)
    found = made.entries.tolist()
    assert wanted <= set(found) and len(set(found)) == len(found)
    assert seed % 2 == 0 or set(found) == wanted, "without a window lines leave no page of a sequence out"
    assert made.n_large_pairs == n_pairs
    assert work.make(dataclasses.replace(plan, batch_invariant=True, shared=()), n_ctas=20).entries is None
