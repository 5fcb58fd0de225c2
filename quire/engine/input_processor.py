"""From what a user sends to a `Request`: encode, check lengths and parameters, resolve defaults.

Owns every check of a request that needs the model or tokenizer. Does not own HTTP fields (`serve`) or queueing.
Invariant: a `Request` made here is accepted by the scheduler, or is refused here with a RequestError.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.config.engine import EngineConfig
from quire.core.beams import BeamTerms
from quire.core.clock import Clock
from quire.core.errors import ClashingParameter, ContextLengthExceeded, InvalidParameter, RequestError
from quire.core.events import EngineReady
from quire.core.request import MAX_SALT_CHARS, Pooling, Request
from quire.core.sampling import MAX_SEED, SamplingParams
from quire.text.length import check_length, too_many_tokens, with_context
from quire.text.thinking import with_budget
from quire.text.tokenizer import HfTokenizer

MAX_BAD_TOKENS = 32
SEED_BITS = 62

NO_BEAMS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "bad_words",
    "allowed_token_ids", "logit_bias", "min_tokens", "prompt_logprobs", "structured_outputs", "thinking_token_budget",
)  # fmt: skip
"""Parameters that would change which beams are found, and are not built into the search."""
_PLAIN = SamplingParams()

Prompt = str | list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """What the checks of sampling parameters found, for all prompts of a request."""

    bad_token_seqs: list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class InputProcessor:
    """Checks against one loaded model."""

    config: EngineConfig
    ready: EngineReady
    tokenizer: HfTokenizer | None
    end_token_ids: list[int]
    clock: Clock
    thinks: bool = False
    """The model's chat template knows reasoning."""
    counter: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        beams: BeamTerms | None = None,
        checked: Checked | None = None,
        token_ids: list[int] | None = None,
    ) -> Request:
        """Build a checked request. Raises InvalidParameter or ContextLengthExceeded.

        pooling: a vector of the prompt is wanted instead of tokens.
        beams: the tokens are to be found by a beam search.
        checked: what `check` gave for these very parameters; None checks them here.
        token_ids: what `encode` gave for this prompt; None encodes it here.
        """
        if checked is None:
            checked = self.check(params)
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_SALT_CHARS:
            raise InvalidParameter("cache_salt", cache_salt, f"a string of at most {MAX_SALT_CHARS} characters")
        if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidParameter("priority", priority, "a 32-bit integer")
        if pooling is not None and (params.n != 1 or params.max_tokens != 1):
            raise InvalidParameter("pooling", pooling.value, "given with n = 1 and max_tokens = 1 (`pooling_params()`)")
        if beams is not None:
            self._check_beams(beams, params)
        if token_ids is None:
            token_ids = self.encode(prompt)
        params = with_budget(params, token_ids, self.tokenizer, thinks=self.thinks)
        if self.config.deterministic and not params.deterministic:
            params = msgspec.structs.replace(params, deterministic=True)
        max_tokens = self.max_tokens(len(token_ids), params)
        number = next(self.counter)  # after every check: refused requests do not shift the seeds of later ones
        return Request(
            request_id=f"req-{number}-{secrets.token_hex(8)}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            seed=derived_seed(self.config.seed, number) if params.seed is None else params.seed & MAX_SEED,
            end_token_ids=[] if params.ignore_eos else self.end_token_ids,
            bad_token_seqs=checked.bad_token_seqs,
            pooling=pooling,
            beams=beams,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=self.clock.now_s(),
        )

    def check(self, params: SamplingParams) -> Checked:
        """Every check of parameters that needs no prompt. Raises RequestError. Safe to call from several threads.

        Takes milliseconds with a large schema, hundreds of bad words or thousands of token ids. Whether a schema or
        grammar is of use only the engine finds out.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParameter("sampling_params", params, "a SamplingParams")
        params.verify(self.ready.logits_width, self.config.max_logprobs)
        if params.deterministic and self.ready.no_determinism:
            raise InvalidParameter("deterministic", True, f"False: {self.ready.no_determinism}")
        if params.deterministic and not params.greedy and params.seed is None:
            raise InvalidParameter(
                "seed",
                None,
                "a number, as deterministic is true and temperature above 0: else the seed would follow "
                "from how many requests came before",
            )
        self._check_text_features(params)
        return Checked(self._bad_token_seqs(params))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (text, or a list, array or tensor of ids), each checked against the logits width."""
        given = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this engine was started without a tokenizer: send token ids", param="prompt")
            check_length(len(prompt), self.ready.max_model_len, "prompt")
            prompt = self.tokenizer.encode(prompt)
        token_ids = _plain_ids(prompt)
        if not token_ids:
            raise InvalidParameter("prompt", given, "at least one token long")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.ready.logits_width:
            bad = low if low < 0 else high
            raise InvalidParameter("prompt", bad, f"token ids between 0 and {self.ready.logits_width - 1}")
        return token_ids

    def max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Output limit after the context and the KV pool are taken into account.

        The scheduler checks the same sum again: only here can max_tokens = None be resolved and the refusal name the
        caller's parameter, and only there does the check also bind clients that write to the engine's socket.
        """
        limit = self.ready.max_model_len
        room = limit - prompt_len
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if room < 1:
            raise ContextLengthExceeded(with_context(too_many_tokens(prompt_len, limit - 1), limit), param="prompt")
        if room < wanted:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens and {wanted} more were asked for, but this model's context holds "
                f"{limit} tokens: shorten the prompt or lower max_tokens to at most {room}",
                param="max_tokens",
            )
        if params.min_tokens > wanted:
            raise InvalidParameter("min_tokens", params.min_tokens, f"at most max_tokens = {wanted}")
        return wanted

    def _check_beams(self, beams: BeamTerms, params: SamplingParams) -> None:
        """Whether there are enough slots, and tokens to choose from. What a search has no meaning for is refused."""
        for name in NO_BEAMS:
            value = getattr(params, name)
            if value == getattr(_PLAIN, name):
                continue
            if name == "structured_outputs":
                raise ClashingParameter(name, "cannot be used with beam search: leave one of the two out")
            raise InvalidParameter(name, value, "left out with beam search")
        n_slots, n_tokens = self.ready.max_num_seqs, beams.n_candidates(len(set(self.end_token_ids)))
        if n_slots and beams.width > n_slots:
            raise InvalidParameter("beam_width", beams.width, f"at most max_num_seqs = {n_slots}, one slot a beam")
        if n_tokens > self.ready.logits_width:
            limit = f"smaller: each beam looks at {n_tokens} next tokens, the model has {self.ready.logits_width}"
            raise InvalidParameter("beam_width", beams.width, limit)

    def _check_text_features(self, params: SamplingParams) -> None:
        if self.tokenizer is None and params.structured_outputs is not None:
            raise RequestError(
                "this engine was started without a tokenizer: output cannot be constrained", param="structured_outputs"
            )
        if self.tokenizer is not None and params.detokenize:
            return
        for name in ("stop", "bad_words"):
            if getattr(params, name):
                raise InvalidParameter(
                    name, getattr(params, name), "empty when text is not produced (detokenize=False or no tokenizer)"
                )

    def _bad_token_seqs(self, params: SamplingParams) -> list[list[int]]:
        """Each bad word at the start of a word and inside text (with and without a leading space), as vLLM does."""
        if not params.bad_words or self.tokenizer is None:
            return []
        seqs: list[list[int]] = []
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if len(ids) > MAX_BAD_TOKENS:
                    raise InvalidParameter("bad_words", word, f"at most {MAX_BAD_TOKENS} tokens long")
                if ids and ids not in seqs:
                    seqs.append(ids)
        return seqs


def derived_seed(engine_seed: int, number: int) -> int:
    """Seed of the `number`-th request of an engine, for a request that brings none: `SEED_BITS` bits of BLAKE2b.

    The same engine seed and the same order of requests give the same text. A seed only chooses among samples of a
    request's own distribution: who guesses it learns nothing of another request.
    """
    digest = hashlib.blake2b(f"{engine_seed}:{number}".encode(), digest_size=8, person=b"quire-seed").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def _plain_ids(prompt: Any) -> list[int]:
    """Python integers from whatever holds token ids; InvalidParameter if something else is in it."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy, torch, array.array
    if not isinstance(ids, (list, tuple)):
        raise InvalidParameter("prompt", prompt, "a text or a list of token ids")
    kinds = set(map(type, ids))
    if kinds <= {int}:
        return list(ids)
    plain = []
    for token_id in ids:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidParameter("prompt", token_id, "a text or a list of token ids, each an integer")
        try:
            plain.append(operator.index(token_id))
        except TypeError:  # arrays and tensors have __index__ whatever they hold
            raise InvalidParameter("prompt", token_id, "a text or a list of token ids, each an integer") from None
    return plain
