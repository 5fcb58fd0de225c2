"""An engine that sleeps and wakes, alone in its process, so that the memory of the device is its own.

Prints JSON: what was allocated awake, asleep and woken again, and the tokens before and after, level by level.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from typing import Any, Final

import torch

from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

LEVELS: Final = (1, 2, 1)


def main(checkpoint: str, eager: bool) -> dict[str, Any]:
    llm = LLM(
        checkpoint, device="cuda", enforce_eager=eager, enable_sleep_mode=True,
        max_num_seqs=16, max_num_batched_tokens=64, num_gpu_blocks_override=4097,
    )  # fmt: skip
    source = random.Random(0)
    batch = [[source.randrange(1, 300) for _ in range(source.randrange(1, 100))] for _ in range(12)]
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

    def tokens() -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(batch, greedy, use_tqdm=False)]

    found: dict[str, Any] = {"tokens": [tokens()], "awake": [allocated()], "asleep": []}
    for level in LEVELS:
        llm.sleep(level)
        found["asleep"].append(allocated())
        llm.wake_up()
        found["tokens"].append(tokens())
        found["awake"].append(allocated())
    llm.shutdown()
    return found


def allocated() -> int:
    """Bytes that tensors hold on the device."""
    gc.collect()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2] == "eager")))
