"""From `max_stall_factor` to the scheduler, and that pacing changes no token."""

from __future__ import annotations

import pathlib

import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine.build import build_engine
from quire.engine.llm import LLM


@pytest.mark.parametrize("factor", [0.0, 2.5])
def test_the_option_reaches_the_scheduler(factor: float) -> None:
    core, _ = build_engine(EngineConfig(model=str(FOLDER / "qwen3-0.6b"), device="null", max_stall_factor=factor))
    pace = core.scheduler.config.pace
    assert (pace.factor if pace else 0.0) == factor
    if pace is not None:
        # 1.2 GB of weights, tied head included, at 4.3 TB/s
        assert pace.step_s(1, 0, 0, 0) == pytest.approx(0.277e-3, rel=0.02)


def test_paced_prompts_give_the_same_tokens(checkpoint: pathlib.Path) -> None:
    prompts = [[7 + i, *range(20, 20 + 70 * i)] for i in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=12 - i, ignore_eos=True) for i in range(4)]

    def run(factor: float) -> tuple[list[list[int]], int]:
        llm = LLM(str(checkpoint), device="cpu", num_gpu_blocks_override=129, max_num_seqs=2, max_stall_factor=factor)
        largest: list[int] = []
        llm.on_step = lambda record: largest.append(record.n_prefill_tokens if record.n_spans > 1 else 0)
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        llm.shutdown()
        return [output.outputs[0].token_ids for output in outputs], max(largest)

    (free, n_free), (paced, n_paced) = run(0.0), run(1.01)
    assert free == paced and n_paced < n_free
