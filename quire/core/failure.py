"""`Failure`: why something went wrong, as a value that crosses processes; `Code`: every word that says it.

Owns the list of codes below the HTTP server, which has some of its own beside them (`serve/http/refusal.py`). Does not
own the exceptions that carry them (`errors.py`).
"""

from __future__ import annotations

import enum

import msgspec


@enum.unique
class Code(enum.StrEnum):
    """Stable words for programs. A client of the server sees them as `code` of an error."""

    INTERNAL_ERROR = "internal_error"
    INVALID_REQUEST = "invalid_request"
    INVALID_PARAMETER = "invalid_parameter"
    MODEL_NOT_FOUND = "model_not_found"
    DUPLICATE_REQUEST_ID = "duplicate_request_id"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    OVERLOADED = "overloaded"
    QUEUE_TIMEOUT = "queue_timeout"
    """A limit on the time of waiting passed."""
    REQUEST_TIMEOUT = "request_timeout"
    """A limit on the time of the whole request passed."""
    REQUEST_QUARANTINED = "request_quarantined"

    INVALID_GRAMMAR = "invalid_grammar"
    """No output can be made to fit, or finding out takes too much."""
    GRAMMARS_BUSY = "grammars_busy"
    GRAMMAR_FAILED = "grammar_failed"
    """The matcher of a sequence failed."""
    GRAMMAR_TOO_SLOW = "grammar_too_slow"
    """The masks of a sequence take too long."""
    EMPTY_MASK = "empty_mask"
    """No token is allowed any more."""

    NON_FINITE_LOGITS = "non_finite_logits"
    OUTPUT_FAILED = "output_failed"
    """Tokens could not be turned into output."""
    DEVICE_OUT_OF_MEMORY = "device_out_of_memory"
    ENGINE_ASLEEP = "engine_asleep"
    ENGINE_ERROR = "engine_error"
    ENGINE_LOST = "engine_lost"
    ENGINE_DEAD = "engine_dead"
    SLEEP_FAILED = "sleep_failed"

    INVALID_CONFIG = "invalid_config"
    DOES_NOT_FIT = "does_not_fit"
    """The model does not fit into memory."""
    LOAD_FAILED = "load_failed"

    BAD_PLAN = "bad_plan"
    CONTROL_INVARIANT = "control_invariant"
    PAGE_ACCOUNTING = "page_accounting"


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """What went wrong. `errors.error_of` makes the exception that it means."""

    code: Code
    message: str
    """For people; it holds no address, path or traceback."""
    param: str | None = None
    """The parameter at fault, for a failure that is the request's own."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
