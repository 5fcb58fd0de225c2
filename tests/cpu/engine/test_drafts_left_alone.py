"""Where nothing is drafted, a step of a device of its own takes hardly more calls of Python than without a drafter.

Calls are counted, not timed, and how often texts are read follows from what a step takes, which is given here: neither
depends on how busy the machine is.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import pytest
import torch
from calling_device import CallingDevice, LivePlans
from family_cases import random_checkpoint

from quire import LLM
from quire.compute import platform
from quire.compute.platform import CudaPlatform
from quire.core.commands import Submit
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import workers

N_STEPS = 64
"""Of which two are timed, and sixteen have texts read."""
STEP_S = 1e-3
"""What steps are said to take: of twelve texts, each is read once in 39 steps."""
MOST_MORE = {1: 22, 4: 34, 12: 22}
"""Calls of a step by sequences, of some 1,250: about 15, and 3 for each text of up to four, which are read in every
fourth step, and up to one for what comes now and then. They were 39, 78 and 35 when each step wrote its tokens to the
host's copy, and read its texts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    found = tmp_path_factory.mktemp("model")
    random_checkpoint(found, "Llama", num_hidden_layers=2, max_position_embeddings=256)
    return found


def n_calls(folder: pathlib.Path, n_seqs: int, **options: Any) -> float:
    """A step, while all sequences decode and are left alone."""
    llm = LLM(
        str(folder), skip_tokenizer_init=True, device="cpu", dtype="float32", max_model_len=256, max_num_seqs=16,
        num_gpu_blocks_override=200, max_num_batched_tokens=64, block_size=16, **options,
    )  # fmt: skip
    engine, policy = llm.engine, llm.engine.scheduler.live.drafts

    def choose(seqs: Any, n_rows: int, n_free: int, step: int) -> list[int]:
        for one in seqs:
            one.drafts_from = step + 10 * N_STEPS
        return [0] * len(seqs)

    policy.choose = choose  # type: ignore[method-assign]
    if policy._seen is not None:
        policy._seen.plain_step_s = lambda n_seqs: STEP_S  # type: ignore[method-assign]
    for i in range(n_seqs):
        params = SamplingParams(temperature=1.5, ignore_eos=True)
        engine.handle(Submit(Request(
            request_id=f"r{i}", prompt_token_ids=[(7 * i + 5 * k) % 250 for k in range(8)], params=params,
            max_tokens=200, seed=i, end_token_ids=[],
        )))  # fmt: skip
    for _ in range(16):
        engine.step()
    n = 0

    def count(frame: Any, event: str, given: Any) -> None:
        nonlocal n
        n += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(N_STEPS):
            engine.step()
    finally:
        sys.setprofile(None)
    llm.shutdown()
    return n / N_STEPS


@pytest.mark.parametrize("n_seqs", [1, 4, 12])
def test_a_step_without_drafts_takes_few_calls_more(
    folder: pathlib.Path, n_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    LivePlans(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform())
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = n_calls(folder, n_seqs)
        more = n_calls(folder, n_seqs, speculative_config={"method": "ngram"}) - plain
    finally:
        torch.set_num_threads(n_threads)
    assert 0 < more <= MOST_MORE[n_seqs]
