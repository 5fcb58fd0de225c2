"""Whom a busy server's answer to a line of a batch keeps waiting."""

from __future__ import annotations

import pytest

from quire.core.errors import GrammarsBusy, QueueFull, QuireError
from quire.serve.http.loopback import LoopbackReply
from quire.serve.http.refusal import Refusal, refusal_of


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        (GrammarsBusy("grammars of this sender had to be stopped"), True),
        (Refusal(429, "too many requests of this key", code="rate_limit_exceeded"), True),
        (QueueFull("the queue is full"), False),
    ],
)
def test_one_tenants_grammars_keep_only_that_tenant_waiting(error: QuireError | Refusal, is_own: bool) -> None:
    refusal = error if isinstance(error, Refusal) else refusal_of(error)
    reply = LoopbackReply(refusal.status, "req_1", refusal.body())
    assert reply.is_busy and reply.is_tenants_own is is_own
