"""The sampler by slots: edits and penalties against transformers, logprobs, reuse of slots, independence of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from quire.compute.sample import FAULT_CODES, Sampled, Sampler, prompt_logprobs, token_logprobs
from quire.core.plan import SlotOpen, SlotParams

WIDTH, N_SLOTS, MAX_LEN = 120, 16, 40
CPU = torch.device("cpu")
POISON = -(2**31)


def make_params(**changes: Any) -> SlotParams:
    defaults = SlotParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, seed=1, logprobs=-1, prompt_logprobs=-1, logit_bias={}, allowed_token_ids=None,
        bad_token_seqs=[], masked_end_ids=[], masked_until=0,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(defaults, name, value)
    return defaults


ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repetition_penalty": 0.8},
    {"temperature": 0.9, "logit_bias": {3: 5.0, 9: -100.0}},
    {"temperature": 0.9, "allowed_token_ids": [4, 5, 6, 100]},
    {"temperature": 0.9, "bad_token_seqs": [[7], [1, 2], [8, 9, 10]]},
    {"temperature": 0.9, "masked_end_ids": [0, 119], "masked_until": 25},
    {"temperature": 0.9, "logprobs": 4},
]


class Bench:
    """A token table with random histories; whatever lies at or beyond a row's position is poison."""

    def __init__(self, seed: int, n_rows: int = 8) -> None:
        rng = np.random.default_rng(seed)
        self.slots = rng.permutation(N_SLOTS)[:n_rows]
        self.positions = rng.integers(5, MAX_LEN, n_rows)
        self.prompt_lens = rng.integers(1, self.positions)
        self.tokens = torch.full((N_SLOTS, MAX_LEN), POISON, dtype=torch.int32)
        for slot, position in zip(self.slots, self.positions, strict=True):
            self.tokens[slot, :position] = torch.from_numpy(rng.integers(0, 12, position).astype(np.int32))
        self.logits = torch.randn(n_rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3

    def history(self, row: int) -> list[int]:
        return self.tokens[self.slots[row], : self.positions[row]].tolist()

    def open_all(self, sampler: Sampler, params: list[SlotParams]) -> None:
        for row, one in enumerate(params):
            prompt_len = int(self.prompt_lens[row])
            sampler.open(SlotOpen(int(self.slots[row]), self.history(row)[:prompt_len], prompt_len, one))

    def sample(self, sampler: Sampler, rows: list[int] | None = None) -> Sampled:
        rows = list(range(len(self.slots))) if rows is None else rows
        return sampler.sample(self.logits[rows].clone(), self.slots[rows], self.positions[rows], self.tokens)

    def edited(self, changes: dict[str, Any]) -> torch.Tensor:
        """The logits as `sample` leaves them behind."""
        sampler = Sampler(N_SLOTS, WIDTH, CPU)
        self.open_all(sampler, [make_params(**changes)] * len(self.slots))
        logits = self.logits.clone()
        sampler.sample(logits, self.slots, self.positions, self.tokens)
        return logits


@pytest.mark.parametrize("penalty", [1.4, 0.6])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    bench = Bench(0)
    edited = bench.edited({"repetition_penalty": penalty})
    for row in range(8):
        ids = torch.tensor([bench.history(row)])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, bench.logits[row : row + 1].clone())
        torch.testing.assert_close(edited[row : row + 1], expected)


def test_presence_and_frequency_count_output_tokens_only() -> None:
    bench = Bench(1)
    edited = bench.edited({"presence_penalty": 0.5, "frequency_penalty": -1.25})
    for row in range(8):
        expected = bench.logits[row].clone()
        output = bench.history(row)[bench.prompt_lens[row] :]
        for token in set(output):
            expected[token] -= 0.5 - 1.25 * output.count(token)
        torch.testing.assert_close(edited[row], expected)


def test_more_penalised_rows_than_are_treated_at_once() -> None:
    sampler = Sampler(80, WIDTH, CPU)
    tokens = torch.arange(80, dtype=torch.int32)[:, None] % WIDTH
    for slot in range(80):
        sampler.open(SlotOpen(slot, [slot], 0, make_params(presence_penalty=2.0)))
    logits = torch.zeros(80, WIDTH)
    sampler.sample(logits, np.arange(80), np.full(80, 1), tokens)
    expected = torch.zeros(80, WIDTH)
    expected[torch.arange(80), torch.arange(80)] = -2.0
    assert torch.equal(logits, expected)


def test_banned_sequences_equal_transformers() -> None:
    banned = [[7], [1, 2], [3, 4], [5, 6, 7], [2, 9], [0, 1, 2, 3], [11] * 39]
    for seed in range(10):
        bench = Bench(seed)
        edited = bench.edited({"bad_token_seqs": banned})
        for row in range(8):
            ids = torch.tensor([bench.history(row)])
            processor = NoBadWordsLogitsProcessor(banned, eos_token_id=torch.tensor([WIDTH - 1]))
            expected = processor(ids, bench.logits[row : row + 1].clone())
            assert torch.equal(edited[row : row + 1] == -torch.inf, expected == -torch.inf)
            kept = expected > -torch.inf
            assert torch.equal(edited[row : row + 1][kept], expected[kept])


def test_a_banned_sequence_sees_a_token_that_the_host_does_not_know() -> None:
    sampler = Sampler(1, WIDTH, CPU)
    sampler.open(SlotOpen(0, [5], 1, make_params(bad_token_seqs=[[5, 6, 50]])))
    logits = torch.zeros(1, WIDTH)
    logits[0, 50] = 9.0
    for last, chosen in ((6, 0), (7, 50)):  # the token at position 1 was written by the step before
        tokens = torch.tensor([[5, last, POISON]], dtype=torch.int32)
        sampled = sampler.sample(logits.clone(), np.array([0]), np.array([2]), tokens)
        assert sampled.token_ids.tolist() == [chosen]


def test_end_tokens_are_masked_until_the_minimum_length() -> None:
    bench = Bench(2)
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    ends = [0, 119]
    n_mins = [max(1, int(n)) for n in bench.positions - bench.prompt_lens + np.arange(8) % 3 - 1]
    params = [
        make_params(masked_end_ids=ends, masked_until=int(prompt_len) + n_min)
        for prompt_len, n_min in zip(bench.prompt_lens, n_mins, strict=True)
    ]
    bench.open_all(sampler, params)
    logits = bench.logits.clone()
    sampler.sample(logits, bench.slots, bench.positions, bench.tokens)
    for row in range(8):
        processor = MinNewTokensLengthLogitsProcessor(int(bench.prompt_lens[row]), n_mins[row], torch.tensor(ends))
        expected = processor(torch.tensor([bench.history(row)]), bench.logits[row : row + 1].clone())
        assert torch.equal(logits[row : row + 1], expected)


def test_bias_and_allowed_ids() -> None:
    bench = Bench(3)
    edited = bench.edited({"logit_bias": {4: 2.5, 8: -100.0}, "allowed_token_ids": [4, 8, 8, 60]})
    expected = torch.full_like(bench.logits, -torch.inf)
    expected[:, [4, 8, 60]] = bench.logits[:, [4, 8, 60]] + torch.tensor([2.5, -100.0, 0.0])
    torch.testing.assert_close(edited, expected)


def test_rows_without_edits_keep_their_bits() -> None:
    bench = Bench(4)
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    bench.open_all(sampler, [make_params(**ALL_KINDS[i % 10]) for i in (0, 3, 1, 6, 2, 7, 9, 5)])
    logits = bench.logits.clone()
    sampler.sample(logits, bench.slots, bench.positions, bench.tokens)
    for row in (0, 2, 4, 6):
        assert torch.equal(logits[row], bench.logits[row])


@pytest.mark.parametrize("seed", range(5))
def test_a_row_does_not_depend_on_its_neighbours(seed: int) -> None:
    bench = Bench(seed, n_rows=N_SLOTS)
    params = [make_params(**ALL_KINDS[i % len(ALL_KINDS)], seed=100 + i) for i in range(N_SLOTS)]
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    bench.open_all(sampler, params)
    together = bench.sample(sampler).token_ids.tolist()
    assert [bench.sample(sampler, [row]).token_ids.item() for row in range(N_SLOTS)] == together
    order = np.random.default_rng(seed).permutation(N_SLOTS).tolist()
    assert bench.sample(sampler, order).token_ids.tolist() == [together[row] for row in order]


def test_the_token_depends_on_seed_and_position_but_not_on_the_slot() -> None:
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    tokens = torch.zeros(N_SLOTS, MAX_LEN, dtype=torch.int32)
    for slot in range(N_SLOTS):
        sampler.open(SlotOpen(slot, [0], 1, make_params(temperature=2.0, seed=slot // 8)))
    logits = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0)).expand(N_SLOTS, -1)

    def at(position: int) -> list[int]:
        positions = np.full(N_SLOTS, position)
        return sampler.sample(logits.clone(), np.arange(N_SLOTS), positions, tokens).token_ids.tolist()

    drawn = [at(position) for position in range(1, 30)]
    assert all(len(set(row[:8])) == 1 and len(set(row[8:])) == 1 for row in drawn)
    assert sum(row[0] != row[8] for row in drawn) > 20, "seeds do not matter"
    assert len({row[0] for row in drawn}) > 15, "positions do not matter"


@pytest.mark.parametrize("kind", range(len(ALL_KINDS)))
def test_a_reused_slot_equals_a_fresh_one(kind: int) -> None:
    bench = Bench(kind)
    used, fresh = Sampler(N_SLOTS, WIDTH, CPU), Sampler(N_SLOTS, WIDTH, CPU)
    everything: dict[str, Any] = {}
    for one in ALL_KINDS:
        everything |= one
    for slot in range(N_SLOTS):
        used.open(SlotOpen(slot, [1], 1, make_params(**everything)))
    for slot in range(0, N_SLOTS, 2):
        used.close(slot)
    params = [make_params(**ALL_KINDS[kind])] * 8
    bench.open_all(used, params)
    bench.open_all(fresh, params)
    left, right = bench.logits.clone(), bench.logits.clone()
    of_used = used.sample(left, bench.slots, bench.positions, bench.tokens)
    of_fresh = fresh.sample(right, bench.slots, bench.positions, bench.tokens)
    assert torch.equal(left, right)
    assert torch.equal(of_used.token_ids, of_fresh.token_ids)
    assert (of_used.logprobs is None) == (of_fresh.logprobs is None)


def test_logprobs_are_of_the_raw_distribution() -> None:
    bench = Bench(5)
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    changes = {"temperature": 0.5, "top_k": 3, "logit_bias": {5: 50.0}, "frequency_penalty": 2.0}
    n_tops = [-1, 0, 3, 5, -1, 2, 0, 5]
    bench.open_all(sampler, [make_params(**changes, logprobs=n) for n in n_tops])
    sampled = bench.sample(sampler)
    assert sampled.logprobs is not None
    lines = dict(
        zip(
            sampled.logprobs.rows.tolist(),
            token_logprobs(sampled.logprobs.n_top, sampled.logprobs.cells),
            strict=True,
        )
    )
    assert sorted(lines) == [row for row, n in enumerate(n_tops) if n >= 0]
    expected = bench.logits.double().log_softmax(-1)
    for row, line in lines.items():
        token = int(sampled.token_ids[row])
        assert line.chosen == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert line.rank == 1 + int((expected[row] > expected[row, token]).sum())
        top = expected[row].topk(n_tops[row])
        assert line.top_ids == top.indices.tolist()
        assert line.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_prompt_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(300, 700, generator=torch.Generator().manual_seed(6)) * 5
    targets = torch.randint(700, (300,), generator=torch.Generator().manual_seed(7), dtype=torch.int32)
    lines = prompt_logprobs(logits, targets, 2)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, targets.long()[:, None])
    values = lines.cells.view(torch.float32)
    torch.testing.assert_close(values[:, 0, 1].double(), chosen[:, 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(lines.cells[:, 0, 0].long(), 1 + (expected > chosen).sum(-1))
    assert torch.equal(lines.cells[:, 1:, 0].long(), expected.topk(2).indices)
    alone = prompt_logprobs(logits[70:71], targets[70:71], 2)
    assert torch.equal(alone.cells, lines.cells[70:71])
    assert len(token_logprobs(lines.n_top, lines.cells)) == 300
    assert token_logprobs(*_nothing()) == []


def _nothing() -> tuple[np.ndarray, torch.Tensor]:
    lines = prompt_logprobs(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int32), 4)
    return lines.n_top, lines.cells


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    sampler = Sampler(2, WIDTH, CPU, vocab_limit=100)
    sampler.open(SlotOpen(0, [1], 1, make_params()))
    sampler.open(SlotOpen(1, [1], 1, make_params(temperature=1.0, logit_bias={110: 100.0})))
    logits = torch.zeros(2, WIDTH)
    logits[:, 100:] = 50.0
    logits[:, 40] = 20.0
    sampled = sampler.sample(logits, np.array([0, 1]), np.array([1, 1]), torch.ones(2, 4, dtype=torch.int32))
    assert sampled.token_ids.tolist() == [40, 40]
    assert sampled.ok.all()


def test_faults_are_flagged_by_row() -> None:
    bench = Bench(8)
    sampler = Sampler(N_SLOTS, WIDTH, CPU)
    params = [make_params(**ALL_KINDS[1], logprobs=1) for _ in range(8)]
    params[3] = make_params(allowed_token_ids=[7], bad_token_seqs=[[7]])
    bench.open_all(sampler, params)
    quiet = bench.sample(sampler).token_ids
    bench.logits[1, 60] = torch.nan
    bench.logits[5] = torch.nan
    sampled = bench.sample(sampler)
    codes = [FAULT_CODES.get(status) for status in sampled.status.tolist()]
    assert codes == [None, "non_finite_logits", None, "empty_mask", None, "non_finite_logits", None, None]
    assert sampled.ok.tolist() == [code is None for code in codes]
    assert sampled.token_ids[sampled.ok].tolist() == quiet[sampled.ok].tolist()
    assert sampled.token_ids[~sampled.ok].tolist() == [0, 0, 0]


def test_ids_beyond_the_logits_are_refused() -> None:
    sampler = Sampler(1, WIDTH, CPU)
    for changes in ({"bad_token_seqs": [[1, WIDTH]]}, {"allowed_token_ids": [-1]}, {"logit_bias": {WIDTH: 1.0}}):
        with pytest.raises(ValueError, match="outside the 120 logits"):
            sampler.open(SlotOpen(0, [1], 1, make_params(**changes)))
