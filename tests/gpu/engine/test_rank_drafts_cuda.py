"""Drafts that have weights, on ranks with a GPU each: captured and eager, tokens are those of one without drafts."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import head_case
import mtp_case
import pytest
import torch
from family_cases import random_checkpoint
from rank_cases import SIZE, answers
from speculative_cases import METHODS, TREES

from quire import LLM, SamplingParams
from quire.compute.draft.head_graphs import HeadGraphs
from quire.compute.runner.lengths import SlotLengths
from quire.control.draft_policy import DraftPolicy

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {**SIZE, "device": "cuda", "max_num_seqs": 12, "num_gpu_blocks_override": 18}
WORK: dict[str, Any] = {
    "device": "cuda", "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60,
}  # fmt: skip


def needs(n_gpus: int) -> None:
    if torch.cuda.device_count() < n_gpus:
        pytest.skip(f"needs {n_gpus} GPUs")


@functools.cache
def answers_of_one() -> list[Any]:
    """The demo's, of one GPU."""
    llm = LLM("", **GPU)
    try:
        found: list[Any] = answers(llm)
    finally:
        llm.shutdown()
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp", "eagle3 tree"])
def test_two_ranks_say_what_one_says(name: str, eager: bool) -> None:
    """With grammars, prefixes, preemption and sleep."""
    needs(2)
    speculative = (METHODS | TREES)[name]
    llm = LLM(
        "", **GPU, tensor_parallel_size=2, enforce_eager=eager, enable_sleep_mode=True, speculative_config=speculative
    )
    try:
        llm.engine.scheduler.live.drafts = DraftPolicy(3, None)  # as many as there may be, whatever steps take here
        found = [answers(llm)]
        stats = llm.stats()
        llm.sleep(2)
        llm.wake_up()
        found.append(answers(llm))
    finally:
        llm.shutdown()
    assert found == [answers_of_one()] * 2
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 10
    assert llm.engine.ranks is not None and llm.engine.ranks.loss is None, "NCCL waits for a captured step"


def turns(llm: LLM) -> list[list[int]]:
    """Texts that end by their tokens while others go on, each the prompt of the next turn."""
    said, prompts = list[list[int]](), [[n, *range(60, 70 + 5 * n)] for n in range(1, 6)]
    ends = [list(range(n, 256, 25)) for n in range(len(prompts))]
    params = [SamplingParams(temperature=n % 2, max_tokens=30, seed=5, stop_token_ids=ends[n]) for n in range(5)]
    for _ in range(3):
        outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        prompts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
        said += prompts
    return said


@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("case", ["eagle3", "mimo", "glm4_moe", "deepseek_v3"])
def test_steps_follow_on_all_ranks(
    case: str, n_ranks: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains stay on the devices, and the next step begins before anybody has heard of them. Ranks that had learnt
    unlike much of the texts would wait for each other."""
    needs(n_ranks)
    options: dict[str, Any] = {"enable_expert_parallel": True} if case == "glm4_moe" else {}
    if case == "eagle3":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        random_checkpoint(tmp_path, "Llama", num_hidden_layers=4, max_position_embeddings=256, **heads)
        head = head_case.write(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3], num_attention_heads=4)
        speculative = {"method": "eagle3", "model": str(head)}
    else:
        mtp_case.write(tmp_path, case)
        speculative = {"method": "mtp"}
    followed, chains = list[object](), list[object]()
    for kind, name, calls in ((SlotLengths, "follow", followed), (HeadGraphs, "_fill_known", chains)):
        real = getattr(kind, name)

        def spy(*given: Any, real: Any, calls: list[object], **how: Any) -> Any:
            calls.append(given)
            return real(*given, **how)

        monkeypatch.setattr(kind, name, functools.partialmethod(spy, real=real, calls=calls))
    found = []
    for more in ({}, {"speculative_config": speculative, "tensor_parallel_size": n_ranks, **options}):
        llm = head_case.drafting(tmp_path, **WORK, **more)
        if more:
            llm.engine.scheduler.live.drafts.choose = lambda seqs, n_rows, n_free, step: [3] * len(seqs)
        try:
            found.append(turns(llm))
        finally:
            llm.shutdown()
    assert found[1] == found[0]
    assert len(followed) > 10 and len(chains) > 10
