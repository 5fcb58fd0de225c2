"""The exception tree from `QuireError` down. Owns every error class that Quire raises on purpose; owns no handling.

├── RequestError                  a request is refused; the engine is unharmed (HTTP 4xx)
│   ├── InvalidParameter          one named field has a bad value; ClashingParameter: or goes not with another
│   ├── ContextLengthExceeded     prompt and output do not fit the context or the pool
│   ├── QueueFull, GrammarsBusy, EngineAsleep, RequestExpired (HTTP 429, 503, 503, 503 or 408)
│   ├── RequestQuarantined
├── ConfigError                   an option, config.json field or machine limit does not fit
├── LoadError                     a checkpoint file is missing, damaged or does not match
└── EngineError                   the engine failed while it ran (HTTP 5xx)
    ├── DeviceOutOfMemory, SleepFailed, EngineLost (another one is being started), EngineDead
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Sequence

from quire.core.failure import Code, Failure

SHOWN_CHARS = 200
"""Longest piece of a user's value that an error message repeats."""
MAX_LISTED = 8
"""Names in a list of them."""
SHOWN_BITS = 640
"""Python refuses to write out much longer integers."""


class _SafeRepr(reprlib.Repr):
    """Nested, huge and unprintable values come out short instead of raising."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = SHOWN_CHARS
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        n_bits = x.bit_length()
        return f"an integer of {n_bits} bits" if n_bits > SHOWN_BITS else super().repr_int(x, level)


_SAFE_REPR = _SafeRepr()


def shown(value: object) -> str:
    """`repr(value)` cut to `SHOWN_CHARS` characters, safe to put into a message; never raises."""
    plain = isinstance(value, (str, bytes))
    text = repr(value[: SHOWN_CHARS + 1]) if plain else _SAFE_REPR.repr(value)  # type: ignore[index]
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def listed(names: Sequence[str]) -> str:
    """`'a', 'b' and 3 more`: names of a user's own, as many as a message should repeat."""
    some = ", ".join(shown(name) for name in names[:MAX_LISTED])
    return f"{some} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else some


def complaint(error: QuireError) -> str:
    """What a terminal is told. Lines of a table stay lines; empty ones and spaces at an end go."""
    lines = [line.rstrip() for line in error.message.splitlines()]
    return "quire: error: " + "\n".join(line for line in lines if line)


class QuireError(Exception):
    """Base of all. `code` is a stable machine-readable word, `param` the field at fault, if one is."""

    code: Code = Code.INTERNAL_ERROR

    def __init__(self, message: str, *, param: str | None = None, code: Code | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def failure(self) -> Failure:
        """It as a value."""
        return Failure(self.code, self.message, self.param)


class RequestError(QuireError):
    """The request cannot be served as asked; nothing was started for it."""

    code = Code.INVALID_REQUEST


class Words:
    """What was given, where that is better told than shown: a message has it without quotation marks."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class InvalidParameter(RequestError):
    """`param` has a value outside what is allowed. Message: what was wrong, the value, the limit, what to do."""

    code = Code.INVALID_PARAMETER

    def __init__(self, param: str, value: object, limit: str, hint: str = "") -> None:
        message = f"{param} = {shown(value)} is not allowed: it must be {limit}."
        super().__init__(f"{message} {hint}".rstrip(), param=param)


class ClashingParameter(InvalidParameter):
    """`param` does not go with something else that was asked. Message: its name, and `said`."""

    def __init__(self, param: str, said: str) -> None:
        RequestError.__init__(self, f"{param} {said}.", param=param)


class ContextLengthExceeded(RequestError):
    """Prompt plus requested output exceed the model's context, or can never fit the KV pool."""

    code = Code.CONTEXT_LENGTH_EXCEEDED


class QueueFull(RequestError):
    """The bounded waiting queue is full; try again later."""

    code = Code.OVERLOADED


class RequestExpired(RequestError):
    """A limit on its time passed: code `queue_timeout` while it waited, `request_timeout` while it ran."""

    code = Code.REQUEST_TIMEOUT


class GrammarsBusy(RequestError):
    """Grammars are compiled one after the other, and too many wait; try again later."""

    code = Code.GRAMMARS_BUSY


class EngineAsleep(RequestError):
    """The engine has given its memory back and takes no request until it is woken."""

    code = Code.ENGINE_ASLEEP


class RequestQuarantined(RequestError):
    """The engine died each time that it ran this request; it is not run again."""

    code = Code.REQUEST_QUARANTINED


class ConfigError(QuireError):
    """A start-up option or a field of config.json cannot be honoured.

    cure: what to do, said behind the message and a colon. `wrong` is the message without it, for who knows better.
    """

    code = Code.INVALID_CONFIG

    def __init__(self, message: str, *, param: str | None = None, code: Code | None = None, cure: str = "") -> None:
        super().__init__(f"{message}: {cure}" if cure else message, param=param, code=code)
        self.wrong = message


class LoadError(QuireError):
    """A checkpoint cannot be loaded. The message names the file and the tensor."""

    code = Code.LOAD_FAILED


@contextlib.contextmanager
def about(option: str, value: str) -> Iterator[None]:
    """ConfigError and LoadError from within begin with the option that led there, whose `param` they have."""
    try:
        yield
    except (ConfigError, LoadError) as error:
        flag = "--" + option.replace("_", "-")
        raise type(error)(f"{flag} {value}: {error.message}", param=option, code=error.code) from None


class EngineError(QuireError):
    """The engine failed while running."""

    code = Code.ENGINE_ERROR


class DeviceOutOfMemory(EngineError):
    """A step asked for more memory than the device has; nothing of it counts, and smaller steps may succeed."""

    code = Code.DEVICE_OUT_OF_MEMORY


class SleepFailed(EngineError):
    """The engine could not give its memory back, or could not get it again. The message says why."""

    code = Code.SLEEP_FAILED


class EngineLost(EngineError):
    """The engine process ended while it ran this request; another one is being started."""

    code = Code.ENGINE_LOST


class EngineDead(EngineError):
    """The engine process ended; every open request fails with this."""

    code = Code.ENGINE_DEAD


_OF_REQUESTS: dict[Code, type[RequestError]] = {
    Code.INVALID_REQUEST: RequestError,
    Code.INVALID_PARAMETER: RequestError,
    Code.MODEL_NOT_FOUND: RequestError,
    Code.DUPLICATE_REQUEST_ID: RequestError,
    Code.CONTEXT_LENGTH_EXCEEDED: ContextLengthExceeded,
    Code.OVERLOADED: QueueFull,
    Code.QUEUE_TIMEOUT: RequestExpired,
    Code.REQUEST_TIMEOUT: RequestExpired,
    Code.INVALID_GRAMMAR: RequestError,
    Code.GRAMMARS_BUSY: GrammarsBusy,
    Code.GRAMMAR_FAILED: RequestError,
    Code.GRAMMAR_TOO_SLOW: RequestError,
    Code.EMPTY_MASK: RequestError,
    Code.ENGINE_ASLEEP: EngineAsleep,
}


def error_of(failure: Failure) -> QuireError:
    """The exception that a failure means: a RequestError if the request is to blame or may be sent again later."""
    kind = _OF_REQUESTS.get(failure.code, EngineError)
    return kind(failure.message, code=failure.code, param=failure.param)
