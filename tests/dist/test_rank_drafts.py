"""Drafts that have weights, on two ranks: a draft model, heads, an MTP module with experts, chains and trees.

Tokens are those of one rank without drafts. Guesses are those that one rank makes, where requests come as they come:
each is seen in this process, which is rank 0; were another rank's others, a draft that counts would have its rows
summed from two texts, and the token behind it would be wrong.
"""

from __future__ import annotations

import pathlib
import random
from typing import Any

import head_case
import mtp_case
import pytest
from family_cases import random_checkpoint
from head_case import Guess, drafting, watched
from rank_cases import SIZE, answers, checkpoint, requests
from speculative_cases import TREES

from quire import LLM, SamplingParams
from quire.control.draft_policy import DraftPolicy
from quire.core.errors import ConfigError
from quire.engine.ranks import group

DEMO = pathlib.Path(__file__).resolve().parents[2] / "quire" / "_models" / "demo"
WORK: dict[str, Any] = {
    "num_gpu_blocks_override": 10, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 96,
}  # fmt: skip
"""With so few pages sequences are preempted, and those that come find what others have left."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", ["draft_model", "eagle3 tree"])
def test_two_ranks_say_what_one_says(name: str, folder: pathlib.Path) -> None:
    """With grammars, prefixes and preemption. The draft model is the model itself."""
    if name == "draft_model":
        model = checkpoint("qwen3", folder / "qwen3")
        speculative: dict[str, Any] = {"model": model, "num_speculative_tokens": 3}
    else:
        model, speculative = str(DEMO), TREES[name]
    alone = LLM(model, **SIZE)
    expected = answers(alone)
    alone.shutdown()
    size = SIZE | {"num_gpu_blocks_override": 18, "max_num_seqs": 12, "enable_sleep_mode": True}
    llm = LLM(model, **size, tensor_parallel_size=2, speculative_config=speculative)
    try:
        llm.engine.scheduler.live.drafts = DraftPolicy(3, None)  # as many as there may be, whatever steps take here
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.accepted_tokens > 10
        if name == "draft_model":
            llm.sleep(2)
            llm.wake_up()
            (again,) = llm.generate([requests()[0][0]], requests()[1][0], use_tqdm=False)
            assert again.outputs[0].token_ids == expected[0][0]
    finally:
        llm.shutdown()


def said_and_guessed(model: pathlib.Path, seen: list[Guess], **options: Any) -> tuple[list[Any], list[Guess]]:
    base = random.Random(1).sample(range(256), 50)
    prompts = [{"prompt_token_ids": [*base[:n], n]} for n in (1, 17, 33, 50)]
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=28, ignore_eos=True) for n in range(4)]
    llm, said = drafting(model, **WORK | options), list[Any]()
    seen.clear()  # what was timed at the start
    try:
        for _ in range(2):
            said += [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.stats()
    finally:
        llm.shutdown()
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    return said, list(seen)


@pytest.mark.parametrize("case", ["eagle3", "glm4_moe"])
def test_two_ranks_guess_what_one_guesses(case: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eagle3: with a table of its own, and one KV head, which both ranks have; glm4_moe: a module with the model's
    table and output matrix, and whole experts on each rank."""
    model, seen = folder / case, watched(monkeypatch)
    options: dict[str, Any] = {"enable_expert_parallel": True} if case == "glm4_moe" else {}
    if case == "eagle3":
        oracle = random_checkpoint(model, "Llama", num_hidden_layers=4, max_position_embeddings=256)
        own = {"embed_tokens.weight": oracle.get_input_embeddings().weight.detach().flip(0).contiguous()}
        tensors = head_case.tensors_of(head_case.HEAD) | own
        head = head_case.write(model / "head", tensors, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
        speculative = {"method": "eagle3", "model": str(head)}
    else:
        mtp_case.write(model, case)
        speculative = {"method": "mtp"}
    plain, _ = said_and_guessed(model, seen)
    alone = said_and_guessed(model, seen, speculative_config=speculative)
    assert alone[0] == plain and len(alone[1]) > 40
    assert said_and_guessed(model, seen, speculative_config=speculative, tensor_parallel_size=2, **options) == alone


def test_what_ranks_cannot_divide(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a rank is started: a head of two heads, a draft model of two."""
    monkeypatch.setattr(group.RankGroup, "start", lambda self: pytest.fail("a process was to be started"))
    model = folder / "whole"
    random_checkpoint(model, "Llama", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    random_checkpoint(folder / "small", "Llama", num_attention_heads=2, num_key_value_heads=2)
    head = head_case.write(folder / "small head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    size = {"device": "cpu", "tensor_parallel_size": 4, "skip_tokenizer_init": True}
    for speculative, said in (
        ({"model": str(folder / "small")}, r"= 4: the draft model .*small is divided as the model is: .*2 .*heads"),
        ({"method": "eagle3", "model": str(head)}, r"= 4: the head .*small head is divided .*\(2 work\); or give"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            LLM(str(model), **size, speculative_config=speculative)
        assert refused.value.param == "speculative_config"
