"""From what a user sends to a `Request`: encode, check lengths and parameters, resolve defaults.

Owns every check of a request that needs the model or tokenizer. Does not own HTTP fields (`serve`) or queueing.
Invariant: a `Request` made here is accepted by the scheduler, or is refused here with a RequestError.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets

from quire.config.engine import EngineConfig
from quire.core.clock import Clock
from quire.core.errors import ContextLengthExceeded, InvalidParameter, RequestError
from quire.core.events import EngineReady
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.text.tokenizer import HfTokenizer

MAX_CHARS_PER_TOKEN = 64
"""No ordinary text has longer tokens on average; a longer prompt is refused before it is tokenized."""
MAX_SALT_CHARS = 256
MAX_BAD_TOKENS = 32

Prompt = str | list[int]


def check_length(n_chars: int, max_model_len: int, param: str) -> None:
    """Refuse a text that cannot fit the context, before it is tokenized. Raises ContextLengthExceeded."""
    if n_chars > max_model_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthExceeded(
            f"{param} has {n_chars} characters: a context of {max_model_len} tokens cannot hold more than "
            f"{max_model_len * MAX_CHARS_PER_TOKEN}",
            param=param,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Intake:
    """Checks against one loaded model."""

    config: EngineConfig
    ready: EngineReady
    tokenizer: HfTokenizer | None
    end_token_ids: list[int]
    clock: Clock
    counter: itertools.count = dataclasses.field(default_factory=itertools.count)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Build a checked request. Raises InvalidParameter or ContextLengthExceeded."""
        params.verify(self.ready.logits_width, self.config.max_logprobs)
        self._check_text_features(params)
        if len(cache_salt) > MAX_SALT_CHARS:
            raise InvalidParameter("cache_salt", cache_salt, f"at most {MAX_SALT_CHARS} characters")
        if not -(2**31) <= priority < 2**31:
            raise InvalidParameter("priority", priority, "a 32-bit integer")
        token_ids = self.encode(prompt)
        return Request(
            request_id=f"{request_id or 'req'}-{next(self.counter)}-{secrets.token_hex(4)}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=self.max_tokens(len(token_ids), params),
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            end_token_ids=[] if params.ignore_eos else self.end_token_ids,
            bad_token_seqs=self._bad_token_seqs(params),
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=self.clock.now_s(),
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, each checked against the logits width."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this engine was started without a tokenizer: send token ids", param="prompt")
            check_length(len(prompt), self.ready.max_model_len, "prompt")
            prompt = self.tokenizer.encode(prompt)
        if not prompt:
            raise InvalidParameter("prompt", prompt, "at least one token long")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.ready.logits_width:
            bad = low if low < 0 else high
            raise InvalidParameter("prompt", bad, f"token ids between 0 and {self.ready.logits_width - 1}")
        return prompt

    def max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Output limit after the context and the KV pool are taken into account."""
        pool_len = (self.ready.n_pages - 1) * self.ready.page_size + 1
        limit = min(self.ready.max_model_len, pool_len)
        room = limit - prompt_len
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if room < wanted or room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens and {wanted} more were asked for, but this model's context holds "
                f"{limit} tokens: shorten the prompt or lower max_tokens to at most {max(room, 0)}",
                param="max_tokens" if room > 0 else "prompt",
            )
        if params.min_tokens > wanted:
            raise InvalidParameter("min_tokens", params.min_tokens, f"at most max_tokens = {wanted}")
        return wanted

    def _check_text_features(self, params: SamplingParams) -> None:
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
