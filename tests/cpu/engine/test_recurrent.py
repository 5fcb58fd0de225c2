"""Models with recurrent layers in the engine: chunks, prefix hits from snapshots, samples, preemption, refusals."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_cases import IDS, checkpoint_of

from quire.compute.platform import CpuPlatform
from quire.control import snapshots
from quire.core.beams import BeamSearchParams
from quire.core.errors import ConfigError, InvalidParameter
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM
from quire.planner.memory import Room

CASES = ("lfm2", "mamba2", "qwen3_next")
N_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
FREE_BYTES = 1_400_000
PROMPTS = [IDS, IDS[:21], [*IDS[:30], 7, 8, 9], IDS, [5], IDS[:17]]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "max_num_seqs": 4, "block_size": 8,
    "max_num_batched_tokens": 24, "num_gpu_blocks_override": 60,
}  # fmt: skip


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_TOKENS", 16)


Known = tuple[pathlib.Path, list[list[int]], torch.Tensor]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A checkpoint, what transformers says after each prompt, and its logprobs of all tokens of the first but one."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = checkpoint_of(request.param, folder)
    said = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = oracle.generate(ids, do_sample=False, max_new_tokens=N_TOKENS, eos_token_id=None)
            said.append(out[0, len(prompt) :].tolist())
        logprobs = oracle(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return folder, said, logprobs.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.fixture
def llm(case: Known) -> Iterator[LLM]:
    made = LLM(str(case[0]), **OPTIONS)
    yield made
    made.shutdown()


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


def test_text_is_that_of_transformers_cold_and_warm(llm: LLM, case: Known) -> None:
    assert texts(llm, PROMPTS) == case[1]
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == case[1]
    assert [one.num_cached_tokens for one in found] == [32, 16, 32, 32, 0, 16]
    grown = IDS + case[1][0]
    (one,) = llm.generate([grown], GREEDY, use_tqdm=False)  # the next turn of a conversation
    assert one.num_cached_tokens == 48
    llm.reset_prefix_cache()
    assert texts(llm, [grown]) == [one.outputs[0].token_ids]


def test_samples_are_the_same_with_and_without_a_cache(llm: LLM, case: Known) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=9, ignore_eos=True)
    (one,) = llm.generate([IDS], params, use_tqdm=False)
    off = LLM(str(case[0]), enable_prefix_caching=False, **OPTIONS)
    (other,) = off.generate([IDS], params, use_tqdm=False)
    assert [out.token_ids for out in one.outputs] == [out.token_ids for out in other.outputs]
    assert off.generate([IDS], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    off.shutdown()


def test_preemption_goes_on_from_a_snapshot(case: Known) -> None:
    tight = LLM(str(case[0]), **{**OPTIONS, "num_gpu_blocks_override": 10, "max_model_len": 64})
    assert texts(tight, PROMPTS) == case[1]
    assert tight.stats().preemptions > 0
    tight.shutdown()


@pytest.mark.parametrize("case", ["mamba2"], indirect=True)
def test_as_many_run_at_once_as_have_room_for_their_states(case: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "room", lambda self: Room(8 << 20, FREE_BYTES))
    options = {**OPTIONS, "max_num_seqs": 0, "max_num_batched_tokens": 64, "max_model_len": 128}
    made = LLM(str(case[0]), **options)
    assert 1 < made.max_num_seqs < 64
    assert texts(made, PROMPTS * 6) == case[1] * 6
    made.shutdown()
    with pytest.raises(ConfigError, match="does not fit"):
        LLM(str(case[0]), **{**options, "max_num_seqs": 64})


def test_prompt_logprobs(llm: LLM, case: Known) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    cold, warm = (llm.generate([IDS], params, use_tqdm=False)[0] for _ in range(2))
    assert warm.num_cached_tokens == 0
    for one in (cold, warm):  # pieces end where states are kept, of which the second finds some
        ours = [row[token].logprob for token, row in zip(IDS[1:], one.prompt_logprobs[1:], strict=True)]
        assert (torch.tensor(ours) - case[2]).abs().max() <= 1e-4
    assert cold.outputs[0].token_ids == case[1][0][:2]


def test_what_states_do_not_allow_is_refused(llm: LLM, case: Known) -> None:
    with pytest.raises(ConfigError, match="recurrent layers"):
        LLM(str(case[0]), speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **OPTIONS)
    with pytest.raises(InvalidParameter, match="recurrent"):
        llm.beam_search([IDS], BeamSearchParams(beam_width=2, max_tokens=3))


def test_sleep_forgets_states(llm: LLM, case: Known) -> None:
    made = LLM(str(case[0]), enable_sleep_mode=True, **OPTIONS)
    assert texts(made, [IDS]) == case[1][:1]
    made.sleep(level=1)
    made.wake_up()
    (one,) = made.generate([IDS], GREEDY, use_tqdm=False)
    assert one.outputs[0].token_ids == case[1][0] and one.num_cached_tokens == 0
    made.shutdown()
