"""The checks that every generating endpoint shares: from the common fields to `SamplingParams`.

Owns ranges, caps and combinations of the fields in `schema.SamplingFields`. Types were checked by the decoder; what
needs the model (token ids, lengths) is checked again by `SamplingParams.verify` and the engine's input processor.
Invariant: a field is honoured, noted as ignored, or refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

from quire.core.errors import InvalidParameter, Words, shown
from quire.core.sampling import OutputKind, SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.serve.http.ignored import IgnoredParams
from quire.serve.http.refusal import Headers, bad_request, unknown_model, unsupported
from quire.serve.openai.schema import SamplingFields

MAX_LABEL_CHARS = 512
MAX_MODEL_CHARS = 512
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_PROMPT_CELLS = 1 << 20
"""Prompt positions times alternatives that one answer may hold; the engine sends them at once."""

SHARED_FIELDS = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in ("max_tokens", "prompt_logprobs", "structured_outputs")
)
"""Fields that mean the same on every endpoint and in `SamplingParams`."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the loaded model and the server allow."""

    model_names: tuple[str, ...]
    logits_width: int
    max_logprobs: int
    max_sequences: int
    max_logprob_cells: int
    max_len: int
    """Tokens of prompt and output that one sequence can have."""
    has_priorities: bool
    """True under --scheduling-policy priority."""
    defaults: dict[str, float]
    """Sampling that the checkpoint proposes where a request says nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChoice:
    """Whether and how the answer is streamed."""

    on: bool
    include_usage: bool
    continuous_usage: bool
    """Every chunk has the counts so far."""


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    """404 unless this server knows the model; None (where the field is optional) passes."""
    if name is None:
        return
    if not name or len(name) > MAX_MODEL_CHARS:
        raise bad_request(
            f"model = {shown(name)} is not allowed: it must be 1 to {MAX_MODEL_CHARS} characters long.", "model"
        )
    if name not in names:
        raise unknown_model(name, names)


def check_labels(body: SamplingFields) -> None:
    """What a client calls its user (`user_label`): only its size is checked."""
    for name in ("user", "safety_identifier"):
        check_text(name, getattr(body, name), MAX_LABEL_CHARS)


def note_stream_options(body: SamplingFields, ignored: IgnoredParams) -> None:
    """Options of a stream ask for nothing where there is none; nor does a part of the counts where there are none."""
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        ignored.note("stream_options")
    elif options.continuous_usage_stats and not options.include_usage:
        ignored.note("stream_options.continuous_usage_stats")


def user_label(*names: str | None) -> str:
    """The first name that a client gave its user, as the scheduler knows it: one of 65,536 labels, "" for nobody."""
    name = next((name for name in names if name), "")
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=2).hexdigest() if name else ""


def check_metadata(metadata: dict[str, str] | None) -> None:
    """400 for labels that are too many or too long."""
    for key, value in (metadata or {}).items():
        if len(metadata or {}) > MAX_METADATA or len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_LABEL_CHARS:
            raise bad_request(
                f"metadata may have at most {MAX_METADATA} keys of at most {MAX_METADATA_KEY_CHARS} characters "
                f"with values of at most {MAX_LABEL_CHARS} characters.",
                "metadata",
            )


def check_text(name: str, value: str | None, max_chars: int) -> None:
    """400 for a label that is too long or has control characters."""
    if value is not None and (len(value) > max_chars or _CONTROL.search(value)):
        raise bad_request(
            f"{name} = {shown(value)} is not allowed: use at most {max_chars} characters, none of them control ones.",
            name,
        )


def stream_choice(body: SamplingFields) -> StreamChoice:
    """What `stream` and `stream_options` ask for."""
    options = body.stream_options
    with_usage = bool(body.stream and options is not None and options.include_usage)
    return StreamChoice(bool(body.stream), with_usage, with_usage and bool(options and options.continuous_usage_stats))


def sampling_params(
    body: SamplingFields,
    limits: RequestLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: StructuredOutputsParams | None = None,
) -> SamplingParams:
    """Verified `SamplingParams` of a request. `max_tokens`, `logprobs` and `prompt_logprobs` differ by endpoint."""
    streaming = stream_choice(body).on
    given: dict[str, Any] = dict(limits.defaults)
    for name in SHARED_FIELDS:
        value = getattr(body, name)
        if value is not None:
            given[name] = value
    params = SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=OutputKind.DELTA if streaming else OutputKind.FINAL_ONLY,
        structured_outputs=structured,
    )
    params.verify(limits.logits_width, limits.max_logprobs)
    return params


def check_priority(priority: int | None, limits: RequestLimits) -> int:
    """The priority of a request; 400 for one that the order of arrival would ignore. Its range: `InputProcessor`."""
    if priority and not limits.has_priorities:
        raise unsupported(
            "priority", "requests run in order of arrival; the operator can start with --scheduling-policy priority."
        )
    return priority or 0


def check_sequences(n_prompts: int, n: int, limits: RequestLimits) -> None:
    """400 if one request asks for more sequences than the server allows in one request."""
    if n_prompts * n > limits.max_sequences:
        raise bad_request(
            f"{n_prompts} prompts times n = {n} are more sequences than one request may have: {limits.max_sequences}.",
            "n" if n_prompts == 1 else "prompt",
        )


def check_cells(prompt_len: int, n_alternatives: int | None, param: str) -> None:
    """400 if the log-probabilities of the prompt would be too large an answer."""
    if n_alternatives is not None and prompt_len * (n_alternatives + 1) > MAX_PROMPT_CELLS:
        raise bad_request(
            f"{param}: {prompt_len} tokens with {n_alternatives} alternatives each exceed {MAX_PROMPT_CELLS} entries.",
            param,
        )


def fit_output(params: SamplingParams, prompt_lens: list[int], limits: RequestLimits, *, is_strict: bool) -> Headers:
    """Lower `max_tokens` to what the context leaves, as vLLM does; returns headers that say so. Where there is no room,
    or less than `min_tokens`, or the request is strict, nothing is lowered: it will be refused for its length. With
    several prompts this leaves the most that one of them has room for; `Generation` looks at each."""
    asked, room = params.max_tokens, limits.max_len - max(prompt_lens)
    if is_strict or asked is None or asked <= room or room < max(1, params.min_tokens):
        return []
    params.max_tokens = min(asked, limits.max_len - min(prompt_lens))
    return [(b"x-max-tokens-requested", b"%d" % asked), (b"x-max-tokens", b"%d" % room)]


def bound_output(
    params: SamplingParams, prompt_lens: list[int], limits: RequestLimits, param: str = "logprobs"
) -> None:
    """InvalidParameter if the log-probabilities of the output could become too large an answer. Where the request gives
    no `max_tokens` it is lowered instead. param: the field that asks for them."""
    if params.logprobs is None:
        return
    n_sequences, n_values = len(prompt_lens) * params.n, params.logprobs + 1
    most_tokens = limits.max_logprob_cells // (n_sequences * n_values)
    if params.max_tokens is None and 0 < most_tokens < limits.max_len - max(prompt_lens):
        params.max_tokens = most_tokens
    if most_tokens < (params.max_tokens or 1):
        asked = (
            f"{n_sequences} x {params.max_tokens or 1} x {n_values} values (sequences x max_tokens x values of a token)"
        )
        raise InvalidParameter(
            param, Words(asked), f"at most {limits.max_logprob_cells} values", "Lower n, max_tokens or logprobs."
        )
