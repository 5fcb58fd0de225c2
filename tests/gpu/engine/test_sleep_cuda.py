"""Sleep on a GPU: its memory comes back at each level, and after waking the same prompts have the same tokens."""

from __future__ import annotations

import gc
import pathlib
import random

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

pytestmark = pytest.mark.gpu
SIZE = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 4097}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def prompts(n: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(1, 300) for _ in range(source.randrange(1, 100))] for _ in range(n)]


@pytest.mark.parametrize("eager", [True, False])
def test_memory_comes_back_and_so_do_the_tokens(checkpoint: pathlib.Path, eager: bool) -> None:
    llm = LLM(str(checkpoint), device="cuda", enforce_eager=eager, enable_sleep_mode=True, **SIZE)
    batch = prompts(12)

    def tokens() -> list[list[int]]:
        return [one.outputs[0].token_ids for one in llm.generate(batch, GREEDY, use_tqdm=False)]

    before = tokens()
    pool = llm.engine.executor._runner._pool  # type: ignore[attr-defined]
    pool_bytes, weight_bytes = pool.k.nbytes + pool.v.nbytes, llm._frontend.ready.model.weight_bytes
    del pool
    gc.collect()
    awake = torch.cuda.memory_allocated()
    for level in (1, 2, 1):
        llm.sleep(level)
        assert awake - torch.cuda.memory_allocated() >= pool_bytes + weight_bytes * 0.9
        llm.wake_up()
        assert tokens() == before
        gc.collect()
        assert torch.cuda.memory_allocated() <= awake * 1.1 + (1 << 20)
    llm.shutdown()
