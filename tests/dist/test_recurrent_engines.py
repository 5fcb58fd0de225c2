"""Engines whose ranks divide recurrent layers, and norms over the heads of all ranks, say what one rank says."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from rank_cases import SIZE, answers, checkpoint

from quire import LLM

TIGHT = {"num_gpu_blocks_override": 20}
"""Pages: too few for the prompts that begin together."""


@pytest.mark.parametrize("name, options, fields", [
    ("qwen3_next", {"tensor_parallel_size": 2, "enable_sleep_mode": True}, {}),
    ("granitemoehybrid", {"tensor_parallel_size": 2, "enable_expert_parallel": True},
     {"num_local_experts": 8, "mamba_n_groups": 1}),
    ("lfm2", {"pipeline_parallel_size": 2}, {}),
    ("bamba", {"pipeline_parallel_size": 3}, {}),
    ("mamba2", {"pipeline_parallel_size": 2, "pp_layer_partition": "2,1"}, {}),
])  # fmt: skip
def test_they_say_what_one_rank_says(
    name: str, options: dict[str, Any], fields: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Heads, groups and columns of mixers divided; a group on two ranks; stages without keys, and one without states;
    prompts cut, found in the cache from a kept state, and computed again."""
    model = checkpoint(name, tmp_path / name, **fields)
    one = LLM(model, **SIZE)
    try:
        expected = answers(one)
    finally:
        one.shutdown()
    llm = LLM(model, **SIZE | TIGHT, **options)
    try:
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.prefix_hits > 0 and (stats.preemptions > 0 or name == "mamba2")
        if "enable_sleep_mode" in options:
            llm.sleep(2)
            llm.wake_up()
            assert answers(llm) == expected
    finally:
        llm.shutdown()
