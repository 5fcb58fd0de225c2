"""Run by `test_sample_triton.py` in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import collections
import logging

import numpy as np
import quick_interpreter  # noqa: F401
import torch
import triton
import triton.language as tl
from test_sample_choose import FEATURES, assert_agrees, joined, make_draw

from quire.kernels.sample import draw as plain
from quire.kernels.sample import floors, reference
from quire.kernels.sample import triton as kernels
from quire.kernels.sample.draw import Choice, Draw, TokenMasks

plain.tl = tl  # the interpreter looks for it beside the function
_mix = triton.jit(plain.mix)


@triton.jit
def _bits(seeds, positions, out, N: tl.constexpr):
    """`keyed_bits` of `seed_key` spelled with the same `mix`."""
    at = tl.arange(0, N)
    keyed = _mix(tl.load(seeds + at) - 7046029254386353131)
    tl.store(out + at, (_mix(keyed + (tl.load(positions + at) + 1) * -7046029254386353131) >> 11) & 0x1FFFFFFFFFFFFF)


def check_random_bits() -> None:
    seeds, positions = torch.arange(64) * 2**56 + 3, torch.arange(64) * 1001
    out = torch.empty(64, dtype=torch.int64)
    _bits[(1,)](seeds, positions, out, N=64)
    assert torch.equal(out, plain.keyed_bits(plain.seed_key(seeds), positions))


def choose(logits: torch.Tensor, draw: Draw) -> Choice:
    out = Choice(torch.zeros(len(draw), dtype=torch.int32), torch.zeros(len(draw), dtype=torch.uint8))
    kernels.choose_by(logits, torch.from_numpy(draw.controls()), out)
    return out


def check_choices(width: int, dtype: torch.dtype) -> None:
    features = list(FEATURES.values())
    logits = torch.randn(len(features) * 2, width, generator=torch.Generator().manual_seed(width)) * 3
    logits[1, :] = (logits[1] * 2).round()
    draw = joined([make_draw(1, seed=i, **features[i % len(features)]) for i in range(len(logits))])
    logits[3, width // 2], logits[4, 0], logits[5] = torch.nan, torch.inf, -torch.inf
    logits = logits.to(dtype)
    choice = choose(logits, draw)
    assert_agrees(choice, logits, draw)
    assert choice.token_ids[3:6].tolist() == [0, 0, 0]
    few = np.array([7, 8])
    assert choose(logits[few], draw.take(few)).token_ids.tolist() == choice.token_ids[few].tolist()


def check_masks(width: int, n_words: int) -> None:
    rng = np.random.default_rng(width)
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, n_words + 1), np.int64).astype(np.int32))[:, :n_words]
    masks = TokenMasks(torch.tensor([2, -1, 0, 1], dtype=torch.int32), bits)
    logits, draw = torch.randn(4, width), make_draw(4, seed=3)
    expected, out = logits.clone(), Choice(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.uint8))
    reference.choose_by(expected, torch.from_numpy(draw.controls()), out, masks)
    kernels.choose_by(logits, torch.from_numpy(draw.controls()), out, masks)
    assert torch.equal(logits, expected) and expected.isinf().any()
    assert_agrees(out, expected, draw)


def spy(module: object, name: str, way: str, calls: collections.Counter[str]) -> None:
    """Count the calls of a function of a module as those of a way."""
    function = getattr(module, name)

    def counted(*args: object) -> object:
        calls[way] += 1
        return function(*args)

    setattr(module, name, counted)


def check_ways() -> None:
    """Few logits, some, thousands, and equal ones: each takes its own way to the floor."""
    calls: collections.Counter[str] = collections.Counter()
    spy(floors, "_rank", "ranked", calls)
    spy(floors, "largest_in", "listed", calls)
    spy(kernels, "largest_in", "collected", calls)
    spy(kernels, "largest_of", "row", calls)
    width = 12_000
    normal = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    outlier = normal * 0.01
    outlier[0, 7] = -3e38
    banned = normal.masked_fill(normal > 0.5, -torch.inf)
    crowd = torch.where(normal < 0, 2 + normal * 1e-5, -20)
    crowd[0, 9] = 5
    cases = [
        (normal * 4, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"ranked": 1}),
        (normal * 4, {"top_k": 90, "min_p": 1.0}, {"ranked": 1}),
        (normal * 3, {"top_k": 93}, {"listed": 1}),
        (normal * 3, {"top_k": 93, "top_p": 0.99}, {"listed": 2}),
        (normal * 2, {"top_p": 0.9}, {"collected": 1}),
        (normal * 2, {"min_p": 1e-3, "top_p": 0.999}, {"listed": 1}),
        (normal, {"min_p": 1e-3, "top_p": 0.99}, {"collected": 1}),
        (normal, {"min_p": 1e-3}, {}),
        (normal * 0.3, {"top_p": 0.9}, {"collected": 1}),
        ((normal * 16).round() / 16, {"top_p": 0.9}, {"collected": 1}),
        (normal * 0.3, {"top_k": 7000}, {"collected": 1}),
        (normal * 2, {"top_k": 9000, "top_p": 0.999}, {"collected": 1, "row": 1}),
        (outlier, {"top_k": width - 1}, {"collected": 1}),
        (banned, {"top_k": 4000, "temperature": 100.0}, {"collected": 1}),
        (normal * 0 + 1.5, {"top_k": 3, "top_p": 0.5}, {"row": 2}),
        (crowd, {"top_p": 0.5}, {"collected": 1}),
        (normal * 0.3, {"top_k": width, "min_p": 1e-6}, {}),
    ]
    for i, (logits, values, expected) in enumerate(cases):
        calls.clear()
        draw = make_draw(1, seed=i, **values)
        assert_agrees(choose(logits, draw), logits, draw)
        assert calls == expected, (values, calls)


def check_bad_guesses() -> None:
    """A guess that holds too many logits, and guesses wholly above and below the floor: the row is gone over again."""
    calls: collections.Counter[str] = collections.Counter()
    spy(kernels, "largest_of", "row", calls)
    normal = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(2))
    features = {"top_p": 0.9}, {"top_k": 9000}, {"top_p": 0.5, "min_p": 1e-3}
    draws = [make_draw(1, seed=i, **one) for i, one in enumerate(features)]
    right, room = kernels.guessed, kernels.ROOM
    try:
        for lower, upper in ((2.0, 3.0), (-3.0, -2.0), (0.5, 0.5)):
            kernels.guessed = lambda *_, ends=(lower, upper): tuple(tl.full((), end, tl.float32) for end in ends)
            for draw in draws:
                assert_agrees(choose(normal, draw), normal, draw)
        kernels.guessed, kernels.ROOM = right, 256
        for draw in draws:
            assert_agrees(choose(normal, draw), normal, draw)
    finally:
        kernels.guessed, kernels.ROOM = right, room
    assert calls["row"] == 12, calls


def check_random_shapes(n_cases: int) -> None:
    """Odd sizes, ties, bans, sorted rows, extreme scales and temperatures."""
    rng = np.random.default_rng(0)
    for i in range(n_cases):
        width = int(rng.choice([rng.integers(1, 300), rng.integers(300, 6000)]))
        logits = torch.randn(2, width, generator=torch.Generator().manual_seed(i))
        logits *= float(rng.choice([0.01, 1, 3, 10, 1e4, 1e30]))
        shape = i % 4
        if shape == 1:
            logits = (logits * 2).round() / 2
        elif shape == 2:
            logits[:, 1::2] = -torch.inf
        elif shape == 3:
            logits = logits.sort(1, descending=bool(i % 8 == 3)).values
        values: dict[str, float] = {"temperature": float(rng.choice([1e-5, 0.05, 0.7, 2, 100, 1e38]))}
        if i % 2:
            values["top_p"] = float(rng.choice([1e-6, 0.1, 0.9, 0.999999]))
        if i % 3:
            values["top_k"] = int(rng.choice([1, 2, 50, 1000, width, width + 1]))
        if i % 5 == 0:
            values["min_p"] = float(rng.choice([1e-9, 0.1, 1]))
        draw = make_draw(2, seed=i, **values)
        assert_agrees(choose(logits, draw), logits, draw)


def check_penalties(longest: int) -> None:
    """Lengths around those of blocks, prompts of all and of nothing, tokens that come many times and once."""
    rng = np.random.default_rng(longest)
    positions = np.array([longest, 0, 1, 127, 128, 129, 200, 65][: max(1, longest)]).clip(max=longest)
    n = len(positions)
    tokens = torch.from_numpy(rng.integers(0, 90, (n + 2, longest + 3)).astype(np.int32))
    prompts = np.array([5, 0, 1, 0, 128, 60, 200, 64][:n]).clip(max=positions)
    spans = np.stack([rng.permutation(n + 1)[:n], rng.permutation(n + 2)[:n], positions, prompts])
    strengths = np.stack([rng.choice([0.7, 1, 1.3], n), rng.choice([-1, 0, 0.4], n), rng.choice([-0.5, 0, 2], n)])
    strengths[:, 0] = 1.3, 0.4, 2
    histories = torch.from_numpy(np.concatenate([spans, strengths.astype(np.float32)]).astype(np.float64))
    logits = torch.randn(n + 1, 90, generator=torch.Generator().manual_seed(longest))
    expected, found = logits.clone(), logits.clone()
    reference.penalise(expected, histories, tokens, longest)
    kernels.penalise(found, histories, tokens, longest)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    wide, again = torch.full((len(histories), n + 3), -1.0, dtype=torch.float64), logits.clone()
    wide[:, 1 : n + 1] = histories
    kernels.penalise(again, wide[:, 1 : n + 1], tokens, longest + 3)
    assert torch.equal(again, found), "lines of a wider buffer, and programs behind all tokens"
    assert not torch.equal(found, logits)


def check_widening() -> None:
    """Rows of a wider tensor, over the end of a program's columns."""
    logits = torch.randn(3, 9000, generator=torch.Generator().manual_seed(0)).half()[:, :8999]
    found = torch.full(logits.shape, -1.0)
    kernels.widen(logits, found)
    assert torch.equal(found, logits.float())


def check_lines(width: int) -> None:
    """Ties of both zeros, bans, targets first, last and most probable, more entries than the kernel looks for."""
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 4
    logits[1] = logits[1].round() * 0.0
    logits[2] = logits[2].round()
    logits[3, ::2] = -torch.inf
    logits[3, width - 1] = 1.5
    targets = torch.tensor([0, width - 1, int(logits[2].argmax()), width - 1, width // 2], dtype=torch.int32)
    for dtype, wishes in ((torch.float32, (0, 1, 5, 20, 40)), (torch.float16, (1, 40))):
        for k in {min(k, width) for k in wishes}:
            given = logits.to(dtype)
            found, expected = kernels.lines(given, targets, k), reference.lines(given, targets, k)
            assert torch.equal(found[..., 0], expected[..., 0]), f"ranks and ids {width} {k} {dtype}"
            values, oracle = found.view(torch.float32)[..., 1], expected.view(torch.float32)[..., 1]
            torch.testing.assert_close(values, oracle, rtol=2e-6, atol=2e-6, msg=f"logprobs {width} {k} {dtype}")
            assert torch.equal(kernels.lines(given[2:4], targets[2:4], k), found[2:4])
            assert torch.equal(kernels.lines(given, targets, 1)[:, 0], found[:, 0])


def check_what_is_said(records: list[logging.LogRecord]) -> None:
    """Wide rows were gone over many times, never by the kernel for Hopper: the log has it once for each reason."""
    said = [one.getMessage() for one in records]
    assert said.count("sample: 'triton' runs instead of the faster 'hopper' (there is no CUDA device)") == 1, said
    assert len(set(said)) == len(said), said


if __name__ == "__main__":
    torch.set_num_threads(1)
    said: list[logging.LogRecord] = []
    logging.getLogger("quire.kernels.choice").addFilter(lambda record: bool(said.append(record)))
    with np.errstate(all="ignore"):
        check_random_bits()
        for n_columns, dtype in ((5, torch.float32), (4500, torch.float32), (4500, torch.float16)):
            check_choices(n_columns, dtype)
        for n_columns, n_mask_words in ((40, 2), (2500, 79), (2500, 70)):
            check_masks(n_columns, n_mask_words)
        for n_tokens in (1, 64, 300):
            check_penalties(n_tokens)
        for n_columns in (1, 5, 129, 5000):
            check_lines(n_columns)
        check_widening()
        check_random_shapes(40)
        check_ways()
        check_bad_guesses()
    check_what_is_said(said)
    print("fine")
