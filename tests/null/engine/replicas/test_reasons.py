"""Why Ray's replicas cannot be started: the replica's own error, of the kind that a single engine would raise."""

from __future__ import annotations

import pytest

from quire.core.errors import ConfigError, EngineError, QuireError
from quire.engine.replicas.reasons import reason_of

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:quire:engine.initialize_and_get_metadata()\x1b[39m (pid=7, ip=127.0.0.1)
  File "/x/quire/engine/supervisor.py", line 94, in start
    raise {name}(error.message)
  quire.core.errors.{name}: {words}

"""


@pytest.mark.parametrize(("name", "kind"), [
    ("ConfigError", ConfigError), ("LoadError", ConfigError), ("EngineError", EngineError), ("EngineDead", EngineError),
])  # fmt: skip
def test_the_replicas_own_error(name: str, kind: type[QuireError]) -> None:
    found = reason_of(["", TRACEBACK.format(name=name, words="a.json: no such thing: leave it out")])
    error = found.error("the replicas cannot be started")
    assert type(error) is kind
    assert error.message == "the replicas cannot be started: a.json: no such thing: leave it out"


def test_what_ray_alone_knows_is_no_fault_of_options() -> None:
    error = reason_of(["The actor died:\n  its node was   preempted."]).error("it cannot be started")
    assert type(error) is EngineError
    assert error.message == "it cannot be started: The actor died: its node was   preempted."
    assert reason_of([]).error("it cannot be").message == "it cannot be: Ray does not say why"
    assert len(reason_of(["x" * 9999]).words) == 600
