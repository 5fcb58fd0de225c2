"""Adapters on a GPU, eager and with graphs: merged weights, mixed batches, changing places, and deterministic bits."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from adapter_case import DENSE, merged, write_adapter
from family_cases import IDS, random_checkpoint

from quire import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.gpu
SIZE: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200, "skip_tokenizer_init": True,
    "device": "cuda", "enable_lora": True, "max_loras": 2,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NAMES = [None, "a", "b", "c", None, "a", "c", "b"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_mixed_batches_equal_merged_weights(family: str, eager: bool, tmp_path: pathlib.Path) -> None:
    """Of Mixtral with adapters of experts in one tensor."""
    has_experts = family == "Mixtral"
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2} if has_experts else {}
    more: dict[str, Any] = {"target_parameters": ["gate_up_proj", "down_proj"]} if has_experts else {}
    targets = DENSE[:4] if has_experts else DENSE
    oracle = random_checkpoint(tmp_path / "model", family, **fields)
    expected, prompt = {}, torch.tensor([IDS])
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, oracle, targets, rank=4 * (seed + 1), seed=seed, **more)
        with merged(oracle, tmp_path / name) as model:
            made = model.generate(prompt, do_sample=False, max_new_tokens=24, eos_token_id=None)
        expected[name] = made[0, len(IDS) :].tolist()
    made = oracle.generate(prompt, do_sample=False, max_new_tokens=24, eos_token_id=None)
    expected[None] = made[0, len(IDS) :].tolist()
    llm = LLM(str(tmp_path / "model"), dtype="float32", enforce_eager=eager, lora_experts=has_experts, **SIZE)
    requests = [None if name is None else LoRARequest(name, 1, str(tmp_path / name)) for name in NAMES]
    for _ in range(2):
        outputs = llm.generate([IDS] * len(NAMES), GREEDY, use_tqdm=False, lora_request=requests)
        assert [one.outputs[0].token_ids for one in outputs] == [expected[name] for name in NAMES]
    llm.shutdown()


def test_deterministic_requests_have_the_same_bits_in_any_company(tmp_path: pathlib.Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    oracle = random_checkpoint(tmp_path / "model", "Llama", dtype=torch.bfloat16, **shape)
    requests = []
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, oracle, rank=16, seed=seed, size=0.05)
        requests.append(LoRARequest(name, 1, str(tmp_path / name)))
    llm = LLM(str(tmp_path / "model"), **SIZE)
    if llm._frontend.ready.no_determinism:
        pytest.skip(llm._frontend.ready.no_determinism)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, logprobs=0, deterministic=True)

    def run(some: list[LoRARequest | None]) -> list[Any]:
        made = llm.generate([IDS] * len(some), params, use_tqdm=False, lora_request=some)
        outputs = [one.outputs[0] for one in made]
        return [[line[t].logprob for line, t in zip(one.logprobs, one.token_ids, strict=True)] for one in outputs]

    alone = [run([one])[0] for one in (None, *requests)]
    together = run([requests[1], None, requests[0], requests[1], None, None, requests[0]])
    assert [together[i] for i in (1, 2, 0)] == alone
    llm.shutdown()
