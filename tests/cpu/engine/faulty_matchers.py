"""A grammar process whose matchers do what the library might: one that is moved by `BAD` crashes, loops or is killed.

Run in the place of `quire.engine.grammars.process`, with the fault as its first argument.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from quire.engine.grammars import matching
from quire.engine.grammars.process import main, serve_matchers
from quire.text.matchers import Matchers

BAD = "q"
"""The text of the token on which the fault shows."""


class FaultyMatchers(Matchers):
    """Looks at the tokens of each move."""

    fault = ""
    bad_tokens: frozenset[int] = frozenset()

    def advance(self, moves: Any) -> Any:
        for handle, tokens in moves:
            if handle in self._live and self.bad_tokens & set(tokens):
                self._marks[0] = handle
                self._watch(False)
                _fail(self.fault)
        return super().advance(moves)


def _fail(fault: str) -> None:
    if fault == "raise":
        raise KeyError("a piece of the user's grammar")
    if fault != "loop":
        os.kill(os.getpid(), {"crash": signal.SIGSEGV, "kill": signal.SIGKILL}[fault])
    while True:  # as native code does that lets nobody else run
        pass


def serve(compiler: Any, settings: Any, connection: Any, marks: Any, masks: Any) -> None:
    tokenizer = compiler._tokenizer
    FaultyMatchers.bad_tokens = frozenset(t for t in range(len(tokenizer)) if tokenizer.token_text(t) == BAD)
    matching.Matchers = FaultyMatchers  # type: ignore[attr-defined, misc]
    serve_matchers(compiler, settings, connection, marks, masks)


if __name__ == "__main__":
    FaultyMatchers.fault = sys.argv.pop(1)
    sys.exit(main(serve))
