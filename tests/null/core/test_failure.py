"""`Failure`: it crosses processes as it is, and one table says which exception it means."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from quire.core import errors
from quire.core.errors import EngineError, QuireError, RequestError, error_of
from quire.core.events import FinishReason, SeqDelta
from quire.core.failure import Code, Failure

KINDS = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, QuireError)]
OF_REQUESTS = [one for one in KINDS if issubclass(one, RequestError) and one.code is not Code.REQUEST_QUARANTINED]


def test_it_crosses_processes() -> None:
    failure = Failure(Code.QUEUE_TIMEOUT, "late: very late", "x")
    delta = SeqDelta("r", 0, [], FinishReason.ERROR, failure=failure)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=SeqDelta)
    assert again.failure == failure and str(again.failure) == "queue_timeout: late: very late"


@pytest.mark.parametrize("kind", OF_REQUESTS)
def test_an_error_of_a_request_comes_back_as_one(kind: type[RequestError]) -> None:
    error = RequestError("why", param="p", code=kind.code)
    again = error_of(error.failure())
    assert isinstance(again, RequestError) and (again.code, again.message, again.param) == (kind.code, "why", "p")
    if kind.__name__ not in {"InvalidParameter", "ClashingParameter", "RequestError"}:
        assert type(again) is kind, "those two word their messages themselves; every other class comes back"


@pytest.mark.parametrize("code", [Code.NON_FINITE_LOGITS, Code.OUTPUT_FAILED, Code.DEVICE_OUT_OF_MEMORY])
def test_what_is_not_the_requests_own_is_the_engines(code: Code) -> None:
    error = error_of(Failure(code, "why"))
    assert isinstance(error, EngineError) and error.code is code


def test_every_class_has_a_code_of_the_list() -> None:
    assert KINDS and all(isinstance(one.code, Code) for one in KINDS)
