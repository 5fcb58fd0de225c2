"""transformers `generate` in static batches, bf16, as a child of `lines.Worker`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.peers.lines import serve


def batch(model: Any, prompts: list[list[int]], output_lens: list[int]) -> tuple[float, float, int]:
    """A left-padded batch until its longest request is done: seconds to the first token, of decode; steps."""
    width, longest = max(map(len, prompts)), max(output_lens)
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    times_s = [time.perf_counter()]

    def after_step(token_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        times_s.append(time.perf_counter())
        return torch.zeros(len(token_ids), dtype=torch.bool)

    model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0,
        stopping_criteria=transformers.StoppingCriteriaList([after_step]),
    )  # fmt: skip
    return times_s[1] - times_s[0], times_s[-1] - times_s[1], len(times_s) - 2


@torch.inference_mode()
def run(model: Any, prompts: list[list[int]], output_lens: list[int], slots: int, unified: bool) -> dict[str, float]:
    """Batches of `slots` in order of arrival; figures as in `lines.continuous`, counting tokens that were asked for."""
    begin_s = time.perf_counter()
    first_s, decode_s, n_decoded = 0.0, 0.0, 0
    for i in range(0, len(prompts), slots):
        took_s, steps_s, n_steps = batch(model, prompts[i : i + slots], output_lens[i : i + slots])
        first_s = first_s or took_s
        decode_s, n_decoded = decode_s + steps_s, n_decoded + n_steps * len(prompts[i : i + slots])
    return {
        "first_s": first_s, "decode_s": decode_s, "n_decoded": n_decoded,
        "total_s": time.perf_counter() - begin_s, "n_out": sum(output_lens),
    }  # fmt: skip


def prepare(model: str, threads: int) -> tuple[Any, Callable[..., Any]]:
    """Load a checkpoint; answers `run`."""
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    loaded.generation_config = transformers.GenerationConfig()
    return {"transformers": transformers.__version__}, lambda op, **request: run(loaded, **request)


if __name__ == "__main__":
    serve(prepare)
