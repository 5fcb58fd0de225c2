"""How the next token is chosen. Owns the public `SamplingParams` (vLLM's names) and its validation.

Does not own the arithmetic (`kernels/sample`) nor stop strings (`text/stop`).
Invariant: a `SamplingParams` that passed `verify` can be served without further checks.
"""

from __future__ import annotations

import enum
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.core.errors import InvalidParameter
from quire.core.structured import StructuredOutputsParams

MAX_N: Final = 128
MAX_STOP_STRINGS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_LISTED_TOKENS: Final = 4096
MAX_BAD_WORDS: Final = 256
MAX_ID_DIGITS: Final = 9
MAX_SEED: Final = 2**63 - 1
MIN_REPETITION_PENALTY: Final = 0.001
"""A logit divided by much less is infinite in float32, and its sequence would fail."""


@enum.unique
class OutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds: all text so far, only the new part, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters of one request. Fields and defaults as in vLLM and the OpenAI API.

    As there, `stop` and `bad_words` may be given as one string, None stands for an empty list, and keys of `logit_bias`
    may be texts.
    """

    n: int = 1
    """Number of independent completions of the prompt, 1 to `MAX_N`."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it (0 to 100; below 1e-5 is treated as greedy)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability, in (0, 1]."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Drop tokens less probable than this share of the most probable one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted for each occurrence of a token already generated, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output, in [0.001, 10]."""
    seed: int | None = None
    """Makes the choice repeatable: token = f(seed, position), whatever the batch. None draws a fresh seed."""
    stop: list[str] = []
    """Strings that end the text (not included unless `include_stop_str_in_output`)."""
    stop_token_ids: list[int] = []
    """Token ids that end the sequence, besides the model's end tokens."""
    bad_words: list[str] = []
    """Words that are never completed."""
    allowed_token_ids: list[int] | None = None
    """If given, only these ids can be chosen."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of the given ids, each in [-100, 100]."""
    min_tokens: int = 0
    """End tokens are masked until this many tokens were generated."""
    max_tokens: int | None = 16
    """Longest output in tokens; None means up to the context length."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    logprobs: int | None = None
    """Number of most probable tokens reported at each output position besides the chosen one (0 = only that)."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    detokenize: bool = True
    """False leaves `text` empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that was found."""
    output_kind: OutputKind = OutputKind.CUMULATIVE
    """What a stream yields."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must look like. End tokens are allowed exactly where the text is complete; it ends by itself where
    nothing can follow, whatever `min_tokens` says."""

    if TYPE_CHECKING:
        # What may be given is wider than what is kept; a test holds these in step with the fields.
        def __init__(
            self,
            *,
            n: int = 1,
            temperature: float = 1.0,
            top_p: float = 1.0,
            top_k: int = 0,
            min_p: float = 0.0,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            repetition_penalty: float = 1.0,
            seed: int | None = None,
            stop: str | Sequence[str] | None = None,
            stop_token_ids: Sequence[int] | None = None,
            bad_words: str | Sequence[str] | None = None,
            allowed_token_ids: Sequence[int] | None = None,
            logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
            min_tokens: int = 0,
            max_tokens: int | None = 16,
            ignore_eos: bool = False,
            logprobs: int | None = None,
            prompt_logprobs: int | None = None,
            detokenize: bool = True,
            skip_special_tokens: bool = True,
            include_stop_str_in_output: bool = False,
            output_kind: OutputKind = OutputKind.CUMULATIVE,
            structured_outputs: StructuredOutputsParams | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in _STRING_LISTS:
            setattr(self, name, _listed([value] if isinstance(value := getattr(self, name), str) else value))
        self.stop_token_ids = _listed(self.stop_token_ids)
        if isinstance(self.allowed_token_ids, tuple):
            self.allowed_token_ids = list(self.allowed_token_ids)
        for name in (*_INTS, *_FLOATS):
            setattr(self, name, _plain_number(getattr(self, name)))
        if isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_LISTED_TOKENS:
            self.logit_bias = {_token_id(key): _plain_number(bias) for key, bias in self.logit_bias.items()}

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken."""
        return self.temperature < 1e-5

    def verify(self, logits_width: int, max_logprobs: int = 20) -> None:
        """Check every field; raises InvalidParameter naming the first that is out of range.

        logits_width: number of logits, the bound for token ids (not the tokenizer's length).
        """
        _verify_numbers(self)
        _verify_lists(self, logits_width)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and 0 <= value <= max_logprobs):
                raise InvalidParameter(
                    name, value, f"an integer between 0 and {max_logprobs}", "Raise --max-logprobs to allow more."
                )
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, getattr(self, name), "True or False")
        if not isinstance(self.output_kind, OutputKind):
            raise InvalidParameter("output_kind", self.output_kind, "an OutputKind")
        if self.structured_outputs is not None:
            _verify_structured(self)


_STRING_LISTS: Final = ("stop", "bad_words")
_INTS: Final = ("n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs")
_FLOATS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_BOOLS: Final = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def _listed(value: Any) -> Any:
    """None as an empty list, a tuple as a list, anything else as it is (`verify` judges it)."""
    if value is None:
        return []
    return list(value) if isinstance(value, tuple) else value


def _plain_number(value: Any) -> Any:
    """Numbers of numpy and the like as Python's own; anything else as it is (`verify` judges it)."""
    if type(value) in (int, float, bool, type(None)) or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, float) else value


def _token_id(key: Any) -> Any:
    """A key of `logit_bias`, which may be text as in JSON."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS:
        return int(key)
    return _plain_number(key)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not _is_int(value) or not low <= value <= high:
        raise InvalidParameter(name, value, f"an integer between {low} and {high}")


def _check_float(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    if not _is_number(value) or not low <= value <= high or (open_low and value == low):  # nan is in no range
        raise InvalidParameter(name, value, f"a number in {'(' if open_low else '['}{low:g}, {high:g}]")


def _verify_numbers(params: SamplingParams) -> None:
    _check_int(params, "n", 1, MAX_N)
    _check_float(params, "temperature", 0.0, 100.0)
    _check_float(params, "top_p", 0.0, 1.0, open_low=True)
    _check_int(params, "top_k", -1, 2**31 - 1)
    _check_float(params, "min_p", 0.0, 1.0)
    _check_float(params, "presence_penalty", -2.0, 2.0)
    _check_float(params, "frequency_penalty", -2.0, 2.0)
    _check_float(params, "repetition_penalty", MIN_REPETITION_PENALTY, 10.0)
    if params.seed is not None:
        _check_int(params, "seed", 0, MAX_SEED)
    if params.max_tokens is not None:
        _check_int(params, "max_tokens", 1, 2**31 - 1)
    _check_int(params, "min_tokens", 0, 2**31 - 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter("min_tokens", params.min_tokens, f"at most max_tokens = {params.max_tokens}")


def _verify_lists(params: SamplingParams, logits_width: int) -> None:
    _check_strings("stop", params.stop, MAX_STOP_STRINGS)
    _check_strings("bad_words", params.bad_words, MAX_BAD_WORDS)
    _check_ids("stop_token_ids", params.stop_token_ids, logits_width)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, logits_width)
        if not params.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", [], "a list with at least one token id")
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, dict):
            raise InvalidParameter("logit_bias", params.logit_bias, "a dict of token ids and numbers")
        _check_ids("logit_bias", list(params.logit_bias), logits_width)
        for bias in params.logit_bias.values():
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise InvalidParameter("logit_bias", bias, "a finite number in [-100, 100] for each token id")


def _verify_structured(params: SamplingParams) -> None:
    structured = params.structured_outputs
    if not isinstance(structured, StructuredOutputsParams):
        raise InvalidParameter("structured_outputs", structured, "a StructuredOutputsParams")
    structured.verify()
    if params.ignore_eos:
        raise InvalidParameter(
            "ignore_eos", True, "False with structured_outputs, whose end is where the text is complete"
        )


def _check_strings(name: str, values: list[str], limit: int) -> None:
    if not isinstance(values, list):
        raise InvalidParameter(name, values, "a string or a list of strings")
    if len(values) > limit:
        raise InvalidParameter(name, f"{len(values)} strings", f"at most {limit} strings")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARS:
            raise InvalidParameter(name, value, f"non-empty strings of at most {MAX_STOP_CHARS} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidParameter(name, value, "valid Unicode text (it has unpaired surrogates)") from None


def _check_ids(name: str, ids: list[int], logits_width: int) -> None:
    if not isinstance(ids, list):
        raise InvalidParameter(name, ids, "a list of token ids")
    if len(ids) > MAX_LISTED_TOKENS:
        raise InvalidParameter(name, f"{len(ids)} ids", f"at most {MAX_LISTED_TOKENS} token ids")
    for token_id in ids:
        if not _is_int(token_id) or not 0 <= token_id < logits_width:
            raise InvalidParameter(name, token_id, f"token ids between 0 and {logits_width - 1}")
