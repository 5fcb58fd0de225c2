"""Small checkpoints that ranks share, and requests that use all of an engine: for one rank and for several."""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

import byte_model
from family_cases import CASES, random_checkpoint

from quire import LLM, SamplingParams, StructuredOutputsParams

FAMILIES: Final = ("qwen3", "gemma2", "gpt_neox", "falcon-new", "qwen2_moe", "deepseek_v2")
"""Whose rows stand as they are; with windows; biased and in parallel; q, k and v in one; with experts; with lines."""
SIZE: Final[dict[str, Any]] = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 112,
    "block_size": 8, "num_threads": 1, "num_gpu_blocks_override": 24,
}  # fmt: skip
NGRAM: Final = {"method": "ngram", "num_speculative_tokens": 3}
COPIES: Final = "one two one two one two one two "
REGEX: Final = "[a-c]{3,9}-(\\d\\d|x+)"


def checkpoint(name: str, folder: pathlib.Path, **more: Any) -> str:
    """With weights of a fixed seed and a tokenizer of bytes. more: of config.json, beside the family's."""
    family, fields = CASES.get(name, ("Qwen3", {"head_dim": 32}))
    if not folder.exists():
        folder.mkdir()
        random_checkpoint(folder, family, **{**fields, "vocab_size": byte_model.N_LOGITS, "eos_token_id": 0, **more})
        byte_model.make_tokenizer(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return str(folder)


def requests() -> tuple[list[str], list[SamplingParams]]:
    """More than run at once; with a common beginning, with repetitions, under grammars, with logprobs, at random."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    bound = SamplingParams(temperature=0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex=REGEX))
    logprobs = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    drawn = SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=12, n=2, ignore_eos=True)
    same = COPIES + "and then "
    prompts = [same + "a", same + "bcd", COPIES, "xyz " * 12, "once " + COPIES, same + "e", "q", same]
    return prompts, [greedy, greedy, greedy, greedy, bound, bound, drawn, logprobs]


def answers(llm: LLM) -> list[Any]:
    """Tokens, and log-probabilities rounded so far that sums in another order do not show."""
    found = []
    prompts, params = requests()
    for one in llm.generate(prompts, params, use_tqdm=False):
        for output in one.outputs:
            places = [
                sorted((token, round(at.logprob, 2)) for token, at in place.items()) for place in output.logprobs or []
            ]
            found.append((list(output.token_ids), output.finish_reason, places))
    return found
