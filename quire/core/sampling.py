"""How the next token is chosen. Owns the public `SamplingParams` (vLLM's names) and its validation.

A parameter is stated here once: its type, bounds and meaning. Checks, flags, the HTTP schema and the docs are derived.
Does not own the arithmetic (`kernels/sample`) nor stop strings (`text/stop`).
Invariants: values are checked when a `SamplingParams` is made; one that passed `verify` can be served without further
checks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from quire.core.errors import InvalidParameter
from quire.core.field_checks import FieldChecks
from quire.core.spelling import NamedArguments
from quire.core.structured import StructuredOutputsParams

MAX_N: Final = 128
MAX_SEED: Final = 2**63 - 1
"""Of 64 bits with a sign; of a negative one `Request.seed` has the 63 bits below the sign."""
MAX_INT32: Final = 2**31 - 1
MAX_LISTED_TOKENS: Final = 4096
PROPOSED: Final = {"proposed": True}
"""`Meta(extra=PROPOSED)`: a checkpoint's generation_config.json may propose a default."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Alternatives = Annotated[int, Meta(ge=0)]
"""The most is the engine's `max_logprobs`."""
TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_LISTED_TOKENS)]
"""Each below the number of logits, which `verify` knows."""
Text = Annotated[str, Meta(min_length=1, max_length=1024)]

NOT_HERE: Final = {
    "logprob_token_ids": "`logprobs` reports the most probable ones",
    "flat_logprobs": "leave it out: it is another shape of `logprobs`",
    "spaces_between_special_tokens": "leave it out: tokens are joined as the tokenizer does",
    "skip_clone": "leave it out: parameters are not changed",
    "output_text_buffer_length": "leave it out: text is held back as long as a stop string may begin in it",
    "extra_args": "leave it out: there are no logits processors of others",
    "routed_experts_prompt_start": "leave it out: which experts were chosen is not told",
    "skip_reading_prefix_cache": "a `cache_salt` of its own finds no prefix",
    "repetition_detection": "`repetition_penalty`, `frequency_penalty`",
}
"""Fields of vLLM's `SamplingParams` that there are not → what to use."""


@enum.unique
class OutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds: all text so far, only the new part, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(
    msgspec.Struct, metaclass=NamedArguments, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling parameters of one request. Fields and defaults as in vLLM and the OpenAI API.

    As there, `stop` and `bad_words` may be given as one string, None stands for an empty list, and keys of `logit_bias`
    may be texts. InvalidParameter names a field whose value is not allowed, TypeError a field that there is not.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_N, description="Independent completions of each prompt.")] = 1
    temperature: Annotated[
        Temperature,
        Meta(
            extra=PROPOSED,
            description="0 takes the most probable token, as does less than 1e-5; higher is more varied: logits are"
            " divided by it.",
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Meta(gt=0, le=1, extra=PROPOSED, description="Keep the smallest set of tokens with at least this probability."),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(ge=-1, le=MAX_INT32, extra=PROPOSED, description="Keep the k most probable tokens; 0 and -1 keep all."),
    ] = 0
    min_p: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            extra=PROPOSED,
            description="Drop tokens less probable than this share of the most probable one.",
        ),
    ] = 0.0
    presence_penalty: Annotated[
        Penalty, Meta(description="Subtracted once from the logit of each token already generated.")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, Meta(description="Subtracted for each occurrence of a token already generated.")
    ] = 0.0
    # A logit divided by much less than 0.001 is infinite in float32, and its sequence would fail.
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=0.001,
            le=10,
            extra=PROPOSED,
            description="Above 1 lowers the tokens of prompt and output: divides positive logits, multiplies negative"
            " ones.",
        ),
    ] = 1.0
    seed: Annotated[
        Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None,
        Meta(
            description="Makes the choice repeatable: a token depends on seed and position, whatever the batch. Without"
            " one it is fresh."
        ),
    ] = None
    stop: Annotated[
        list[Text],
        Meta(max_length=64, description="Strings that end the text, of which they are no part."),
    ] = []
    stop_token_ids: Annotated[
        TokenIds, Meta(description="Token ids that end the sequence, besides the model's end tokens.")
    ] = []
    bad_words: Annotated[list[Text], Meta(max_length=256, description="Words that are never completed.")] = []
    allowed_token_ids: Annotated[
        Annotated[TokenIds, Meta(min_length=1)] | None, Meta(description="If given, only these ids can be chosen.")
    ] = None
    logit_bias: Annotated[
        Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LISTED_TOKENS)] | None,
        Meta(description="Added to the logits of the given ids."),
    ] = None
    min_tokens: Annotated[Count, Meta(description="End tokens are masked until this many tokens were generated.")] = 0
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_INT32)] | None,
        Meta(description="Longest output in tokens; null (None) stands for what the context holds."),
    ] = 16
    ignore_eos: Annotated[bool, Meta(description="Go on after the model's end token.")] = False
    logprobs: Annotated[
        Alternatives | None,
        Meta(description="Most probable tokens reported at each output position besides the chosen one."),
    ] = None
    prompt_logprobs: Annotated[Alternatives | None, Meta(description="The same at each position of the prompt.")] = None
    detokenize: Annotated[bool, Meta(description="Without it there is no text.")] = True
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop string that was found.")] = False
    output_kind: Annotated[OutputKind, Meta(description="What a stream yields.")] = OutputKind.CUMULATIVE
    structured_outputs: Annotated[
        StructuredOutputsParams | None,
        Meta(
            description="What the text must look like. End tokens are allowed exactly where the text is complete; it"
            " ends by itself where nothing can follow, whatever min_tokens says."
        ),
    ] = None
    thinking_token_budget: Annotated[
        Count | None,
        Meta(
            description="Once the reasoning of a model that thinks has so many tokens, its end is written. Without one"
            " the model decides."
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Meta(
            description="The same tokens and log-probabilities, bit for bit, whatever else runs, is cached or is"
            " preempted. A device that cannot promise it refuses."
        ),
    ] = False

    elsewhere: ClassVar[Mapping[str, str]] = NOT_HERE

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
            thinking_token_budget: int | None = None,
            deterministic: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        CHECKS.run(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.ignore_eos and (self.structured_outputs is not None or self.thinking_token_budget is not None):
            name = "thinking_token_budget" if self.structured_outputs is None else "structured_outputs"
            raise InvalidParameter("ignore_eos", True, f"False with {name}, whose end is where the text is complete")

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken."""
        return self.temperature < 1e-5

    def verify(self, logits_width: int, max_logprobs: int = 20) -> None:
        """Check what depends on the model, and again every field, which may have been set since. Raises
        InvalidParameter naming the first that is bad.

        logits_width: number of logits, the bound for token ids (not the tokenizer's length).
        """
        self.__post_init__()
        for name, listed in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            if listed and max(listed) >= logits_width:
                raise InvalidParameter(name, max(listed), f"token ids between 0 and {logits_width - 1}")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and value > max_logprobs:
                raise InvalidParameter(
                    name, value, f"an integer between 0 and {max_logprobs}", "Raise --max-logprobs to allow more."
                )
        if self.structured_outputs is not None:
            self.structured_outputs.verify()


CHECKS: Final = FieldChecks(SamplingParams)
"""Of single fields."""
PROPOSED_FIELDS: Final = tuple(
    name
    for name, kind in CHECKS.types.items()
    if isinstance(kind, msgspec.inspect.Metadata) and (kind.extra or {}).get("proposed")
)
"""Fields that transformers and `SamplingParams` share in name and meaning."""
