"""Requests under grammars, and who guesses their tokens: for tests of their drafts on any device."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hidden_tree import hidden_tree

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.compute.draft.drafter import DraftContext, EachSequence, Guess

END = 0
N_GUESSED = 12
"""At most, so that some spans have fewer drafts than were planned."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "catalogue", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"json": PERSON},
    "tight schema": {"json": PERSON, "disable_any_whitespace": True},
    "regex": {"regex": "[a-c]{3,9}-(\\d\\d|x+)"},
    "pairs": {"regex": "(ab|ba|cd|dc){8,30}"},
    "choice": {"choice": ["alpha", "alphabet", "beta", "be"]},
    "lark": {"grammar": 'start: "a" rest\nrest: /[0-9]{2,12}/'},
    "gbnf": {"grammar": 'root ::= ("x" | "y")+ "!"'},
    "late": {"regex": "ab+", "begins_after": ".", "begins_within": 6},
    "late and free": {"begins_after": ".!", "begins_within": 4},
    "free": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 12, "structured_outputs": StructuredOutputsParams(regex="[a-z]*")},
    "stop": {"stop": ["b"], "structured_outputs": StructuredOutputsParams(regex="[a-c]{2,40}")},
    "stop that never comes": {"stop": ["yy"], "structured_outputs": StructuredOutputsParams(regex="ab(cd|efg)+[xz]")},
    "several": {"n": 3, "structured_outputs": StructuredOutputsParams(regex="[a-c]{2,40}")},
    "logprobs": {"logprobs": 2, "structured_outputs": StructuredOutputsParams(json=PERSON)},
    "penalties": {"presence_penalty": 1.0, "structured_outputs": StructuredOutputsParams(regex="[a-e]{9}")},
    "nothing is left": {"allowed_token_ids": [65, 66], "structured_outputs": StructuredOutputsParams(regex="[ab]{9}c")},
    "bias": {"logit_bias": {70: 4.0}, "structured_outputs": StructuredOutputsParams(regex="[A-Z]{2,20}x")},
}


class Teller:
    """Knows what plain decoding said, tells the truth with a chance that goes with the place, and goes on behind the
    end, which must not count."""

    def __init__(self, wholes: list[list[int]], chance: float) -> None:
        self._wholes, self._chance = wholes, chance
        self.n_asked = 0

    def open(self, slot: int, salt: str, prompt_len: int) -> None: ...

    def close(self, slot: int, tokens: np.ndarray) -> None: ...

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        known = tokens.tolist()
        n, whole = min(n, N_GUESSED), self._whole(known)
        found = []
        for at in range(len(known), len(known) + n):
            is_right = random.Random(f"{whole[:4]} {at}").random() < self._chance
            said = whole[at] if at < len(whole) else END
            found.append(said if is_right else (said + 1) % 256)
        self.n_asked += n
        return found

    def _whole(self, known: list[int]) -> list[int]:
        """What these tokens belong to; a step behind the last one, for nobody, may be asked, too."""
        whole = next((one for one in self._wholes if one[: len(known)] == known[: len(one)]), None)
        assert whole is not None, f"the token table holds {bytes(max(0, t - 1) for t in known)}"
        return whole


class Hider(Teller):
    """Knows the same, and hides it in random trees; chains where there may be none."""

    def __init__(self, wholes: list[list[int]], chance: float) -> None:
        super().__init__(wholes, chance)
        self.n_trees = self.n_chains = 0

    def guess_one(self, context: DraftContext) -> Guess:
        known = context.tokens.tolist()
        if not context.may_branch:
            self.n_chains += 1
            return self.guess(context.slot, context.tokens, context.most)
        whole = self._whole(known)
        rng = random.Random(f"{whole[:4]} {len(known)}")
        n = min(context.most, rng.randint(1, N_GUESSED))
        self.n_trees, self.n_asked = self.n_trees + 1, self.n_asked + n
        return hidden_tree(whole, len(known), n, self._chance, rng, 256, likely=0.5)


class HidingDrafter(EachSequence):
    """A `Hider` as the device asks it."""

    def __init__(self, hider: Hider) -> None:
        super().__init__(hider)
        self._hider = hider

    def guess(self, contexts: Sequence[DraftContext]) -> list[Guess]:
        return [self._hider.guess_one(one) for one in contexts]


def wishes() -> tuple[list[str], list[SamplingParams]]:
    """Each kind greedily and at random; every prompt another one."""
    made = []
    for i, kind in enumerate(KINDS.values()):
        for temperature in (0.0, 1.0):
            structured = StructuredOutputsParams(**kind) if kind else None
            made.append(SamplingParams(max_tokens=70, temperature=temperature, seed=i, structured_outputs=structured))
    made += [SamplingParams(**{"max_tokens": 40, "temperature": 0.8, "seed": 5} | one) for one in OTHERS.values()]
    return [f"{i:03} says" for i in range(len(made))], made


def engine(folder: pathlib.Path, **options: Any) -> LLM:
    options = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 128, "block_size": 8} | options
    return LLM(str(folder), load_format="dummy", num_threads=1, **options)


def drafting(folder: pathlib.Path, most: int = 40, **options: Any) -> LLM:
    llm = engine(folder, speculative_config={"method": "ngram", "num_speculative_tokens": most}, **options)
    llm.engine.scheduler.live.drafts.costs = None  # as many as there is room for
    return llm


def hide(llm: LLM, wholes: list[list[int]], chance: float) -> Hider:
    hider = Hider(wholes, chance)
    llm.engine.executor.worker.runner._lengths._drafter = HidingDrafter(hider)
    return hider


def tell(llm: LLM, wholes: list[list[int]], chance: float) -> Teller:
    teller = Teller(wholes, chance)
    llm.engine.executor.worker.runner._lengths._drafter = EachSequence(teller)
    return teller


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(*wishes(), use_tqdm=False)
    assert llm.engine.grammars.n_live == 0 and llm.engine.grammars.n_compiling == 0
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, one.failure and one.failure.code)
        for request in outputs
        for one in request.outputs
    ]


def wholes_of(llm: LLM, said: list[Any]) -> list[list[int]]:
    prompts = [llm.tokenizer.encode(one) for one, params in zip(*wishes(), strict=True) for _ in range(params.n)]
    return [[*prompt, *one[1]] for prompt, one in zip(prompts, said, strict=True)]


def compared(llm: LLM, answer: Any) -> list[Any]:
    """What must be equal: on a GPU logprobs need not, whose sums depend on the rows of a step."""
    text, token_ids, *ends, logprobs, failure = answer
    return [text, token_ids, *ends, failure, logprobs if llm.engine.executor.worker.platform.name == "cpu" else None]


def check(
    llm: LLM,
    expected: list[Any],
    chances: tuple[float, ...],
    tell: Callable[[LLM, list[list[int]], float], Teller] = tell,
) -> None:
    """Drafts that are right, wrong, and by chance, which the engine shuts down after. tell: or `hide`."""
    try:
        for chance in chances:
            before = llm.stats()
            teller = tell(llm, wholes_of(llm, expected), chance)
            for found, one in zip(answers(llm), expected, strict=True):
                assert compared(llm, found) == compared(llm, one)
            after = llm.stats()
            n_right = after.accepted_tokens - before.accepted_tokens
            assert teller.n_asked > 200 and n_right > 20, "what a grammar foretells is right whoever guesses"
            if isinstance(teller, Hider):
                assert teller.n_trees > 100 and teller.n_chains > 0, "penalties take chains"
            elif chance == 1.0 and not after.preemptions:
                assert n_right > 0.6 * sum(len(one[1]) for one in expected), "right drafts count"
    finally:
        llm.shutdown()
