"""Clients that leave, stop strings and preemption while others verify drafts: who stays reads what is said without."""

from __future__ import annotations

import pytest
from draft_traffic import check_those_that_stay

FEW_PAGES = {"max_num_seqs": 24, "max_model_len": 384, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 30}


@pytest.mark.parametrize("name", ["draft_model", "mtp", "eagle3 tree"])
def test_who_stays_reads_the_same(name: str) -> None:
    check_those_that_stay(name, 20, **FEW_PAGES)
