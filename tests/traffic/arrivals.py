"""Random requests: shared prefixes, conversations that go on, lengths from 1 to nearly the context, odd parameters."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Final

import msgspec

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.input_processor import InputProcessor

N_GROUPS: Final = 4
MIN_PREFIX: Final = 256
"""Shortest common prefix of a group: from here on attention on CUDA reads it once."""
SALTS: Final = ("", "", "", "", "a", "b")


@dataclasses.dataclass(slots=True)
class Refusal:
    """A submission that the engine refused, as it had to."""

    code: str


class Arrivals:
    """A seeded source of requests for one engine. `longest`: prompt plus output in tokens."""

    def __init__(self, input_processor: InputProcessor, seed: int, longest: int, max_output: int) -> None:
        self.random = random.Random(seed)
        self._input_processor = input_processor
        self._longest = longest
        self._max_output = max_output
        self._vocab_size = input_processor.ready.logits_width
        self._prefixes = [self._prefix() for _ in range(N_GROUPS)]
        self._history: list[list[int]] = []
        self._number = 0

    def request(self) -> Request:
        """One that must be accepted."""
        params = self._params()
        prompt = self._prompt(self._longest - (params.max_tokens or 1))
        return self._build(prompt, params)

    def group(self, n: int) -> list[Request]:
        """`n` greedy requests whose prompts share one long prefix and differ after it."""
        prefix = self.random.choice(self._prefixes)
        requests = []
        for _ in range(n):
            params = SamplingParams(temperature=0, max_tokens=self.random.randint(4, self._max_output))
            tail = self._tokens(self.random.randint(1, 24))
            requests.append(self._build((prefix + tail)[: self._longest - self._max_output], params, salt=""))
        return requests

    def doomed(self) -> Request:
        """One that leaves no token to choose: it must end with the error `empty_mask`, and disturb nobody."""
        token = self.random.randrange(self._vocab_size)
        params = SamplingParams(
            allowed_token_ids=[token], stop_token_ids=[token], min_tokens=2, max_tokens=4,
            temperature=self.random.choice([0.0, 1.0]), n=self.random.choice([1, 1, 2]),
        )  # fmt: skip
        return self._build(self._prompt(self._longest - 4), params)

    def refused(self) -> Refusal:
        """Try one that must be refused before the engine sees it; ValueError if it was not."""
        return self.refuse(self.random.choice(ODD))

    def refuse(self, params: dict[str, Any] | None) -> Refusal:
        """Try this one of ODD."""
        prompt = self._tokens(3)
        if params is None:
            prompt, params = self._tokens(self._input_processor.ready.max_model_len), {"max_tokens": 1}
        try:
            self._input_processor.request(prompt, SamplingParams(**params))
        except RequestError as error:
            return Refusal(error.code)
        raise ValueError(f"accepted: {params}")

    def remember(self, ids: list[int]) -> None:
        """Text of a finished sequence, which a later request may continue."""
        self._history.append(ids)
        del self._history[:-16]

    def _build(self, prompt: list[int], params: SamplingParams, salt: str | None = None) -> Request:
        choose = self.random.choice
        request = self._input_processor.request(
            prompt, params, priority=choose([0, 0, 1, -1]), cache_salt=choose(SALTS) if salt is None else salt
        )
        self._number += 1
        banned = [self._tokens(self.random.randint(1, 3)) for _ in range(3)] if self.random.random() < 0.1 else []
        ends = self._tokens(2) if not params.ignore_eos else []
        return msgspec.structs.replace(
            request, request_id=f"r{self._number}", bad_token_seqs=banned, end_token_ids=ends,
        )  # fmt: skip

    def _tokens(self, n: int) -> list[int]:
        return self.random.choices(range(self._vocab_size), k=n)

    def _prefix(self) -> list[int]:
        return self._tokens(self.random.randint(MIN_PREFIX, max(MIN_PREFIX, self._longest // 2)))

    def _prompt(self, room: int) -> list[int]:
        """At most `room` tokens."""
        draw = self.random.random()
        if draw < 0.02:
            self._prefixes[self.random.randrange(N_GROUPS)] = self._prefix()
        if draw < 0.4:
            prefix = self.random.choice(self._prefixes)
            cut = self.random.choice([len(prefix), len(prefix), self.random.randint(1, len(prefix))])
            return (prefix[:cut] + self._tokens(self.random.randint(0, 40)))[:room]
        if draw < 0.5 and self._history:
            return (self.random.choice(self._history) + self._tokens(self.random.randint(1, 20)))[:room]
        if draw < 0.54:
            return self._tokens(room - self.random.randint(0, room // 4))
        return self._tokens(min(room, self.random.choice([1, 2, 15, 16, 17, 40, 100, self.random.randint(1, 200)])))

    def _params(self) -> SamplingParams:
        choose, chance, integer = self.random.choice, self.random.random, self.random.randint
        n_out = choose([integer(1, 16), integer(1, self._max_output)])
        fields: dict[str, Any] = {
            "temperature": choose([0.0, 0.0, 0.0, 0.7, 1.0, 2.0, 0.01]),
            "max_tokens": n_out,
            "ignore_eos": chance() < 0.5,
            "n": choose([1, 1, 1, 1, 2, 3, 5]),
        }
        if chance() < 0.5:
            fields |= {"top_k": choose([0, 1, 5, 40, -1, 2**31 - 1]), "top_p": choose([1.0, 0.95, 0.5, 1e-6])}
            fields |= {"min_p": choose([0.0, 0.0, 0.05, 1.0])}
        if chance() < 0.25:
            fields |= {"presence_penalty": choose([0.0, 1.5, -2.0]), "frequency_penalty": choose([0.0, 0.3, -1.0])}
            fields |= {"repetition_penalty": choose([1.0, 1.3, 0.8])}
        if chance() < 0.2:
            fields["logit_bias"] = {token: choose([-100.0, -3.0, 2.5, 100.0]) for token in self._tokens(4)}
        if chance() < 0.1:
            fields["allowed_token_ids"] = sorted(set(self._tokens(20)))
        if chance() < 0.2:
            fields |= {"stop_token_ids": self._tokens(self._vocab_size // 20), "min_tokens": integer(0, n_out)}
            if "allowed_token_ids" in fields:  # else what is allowed may be all masked
                fields["min_tokens"] = 0
        if chance() < 0.3:
            fields["logprobs"] = choose([0, 1, 7])
        if chance() < 0.1:
            fields["prompt_logprobs"] = choose([0, 3])
        if chance() < 0.6:
            fields["seed"] = choose([0, 1, 2**63 - 1, integer(0, 2**40)])
        return SamplingParams(**fields)


ODD: Final[list[dict[str, Any] | None]] = [
    None, {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5},
    {"n": 0}, {"n": 10**9}, {"seed": 1 << 63}, {"max_tokens": 0}, {"max_tokens": 10**6}, {"logprobs": 10**3},
    {"prompt_logprobs": -1}, {"repetition_penalty": 0.0}, {"presence_penalty": float("inf")},
    {"logit_bias": {10**9: 1.0}}, {"logit_bias": {1: float("nan")}}, {"allowed_token_ids": []},
    {"allowed_token_ids": [-1]}, {"stop_token_ids": [10**9]}, {"min_tokens": 9, "max_tokens": 3}, {"stop": ["x"]},
]  # fmt: skip
"""Parameters that must be refused; None: a prompt that fills the context."""
