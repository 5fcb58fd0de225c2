"""Random traffic with drafts on a GPU: cancelled at any moment, preempted, ended by stop strings; no page is left."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from draft_traffic import check_those_that_stay
from speculative_cases import METHODS, TREES
from traffic.checkpoint import WIDE, write_checkpoint
from traffic.soak import CUDA, Soak

pytestmark = pytest.mark.gpu
FEW_PAGES: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 24, "max_model_len": 384, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 44,
}  # fmt: skip


@pytest.mark.parametrize("config", [METHODS["ngram"], METHODS["suffix"], TREES["suffix tree"]], ids=str)
def test_no_wrong_token_and_nothing_leaked(tmp_path: pathlib.Path, config: dict[str, Any]) -> None:
    """Judged by transformers; a sequence that its client ends is what a stop string does."""
    model = write_checkpoint(tmp_path, "Llama", WIDE, torch.float32)
    soak = Soak(tmp_path, model, seed=3, **CUDA | {"speculative_config": config | {"num_speculative_tokens": 5}})
    drafts = soak.core.scheduler.live.drafts
    drafts.costs = None  # as many as there is room for
    found = soak.run(n_steps=400)
    assert not found.faults
    assert drafts.n_verified > 500 and sum(drafts.n_right) > 20
    assert found.cancels > 5 and found.preemptions > 0 and found.prefix_hits > 0
    assert found.verdicts.n_tokens == found.tokens > 1000


@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp", "eagle3 tree"])
def test_stop_strings_and_clients_that_leave(name: str) -> None:
    check_those_that_stay(name, 48, **FEW_PAGES)
