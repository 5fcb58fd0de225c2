"""Trying a stranger's grammar: translated, compiled, and followed a little way, before others depend on it.

Owns what a trial consists of. Does not own the process that it may end (`engine/grammars/process`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

import msgspec

from quire.core.errors import QuireError, RequestError, error_of
from quire.core.failure import Failure
from quire.core.structured import StructuredOutputsParams
from quire.text.grammar import GrammarCompiler, grammar_of, refused
from quire.text.matcher import Matcher

N_WALKS: Final = 4
WALK_TOKENS: Final = 48
WALKS_S: Final = 0.05
"""Processor seconds after which no other token is tried."""


class Verdict(msgspec.Struct, tag=True):
    """What a trial has found: a grammar, or why there is none."""

    grammar: str = ""
    compile_s: float = 0.0
    """Processor time of translating and compiling."""
    failure: Failure | None = None

    def error(self) -> QuireError | None:
        """The refusal, if it is one."""
        return None if self.failure is None else error_of(self.failure)


def tried(compiler: GrammarCompiler, params: StructuredOutputsParams, before_walk: Callable[[], object]) -> Verdict:
    """Translate, compile and follow. before_walk: called between compiling and following."""
    start_s = time.process_time()
    matchers: list[Matcher] = []
    try:
        if (params.begins_after, params.frame) != (None, None):  # what follows is not reached from the beginning
            bare = msgspec.structs.replace(params, begins_after=None, frame=None)
            matchers.append(compiler.compile(grammar_of(bare)))
        grammar = grammar_of(params)
        matchers.append(compiler.compile(grammar))
    except RequestError as error:
        return Verdict(failure=error.failure())
    compile_s = time.process_time() - start_s
    before_walk()
    for matcher in matchers:
        dead_end = _walk(matcher)
        if dead_end:
            return Verdict(failure=refused(dead_end).failure())
    return Verdict(grammar, compile_s)


def _walk(matcher: Matcher) -> str:
    """Write random texts that fit, as a model would: a grammar that makes the library loop mostly does so here.

    Returns why none came further than its first token, if so; other dead ends say nothing: a model may take other ways.
    """
    chance, start_s = random.Random(0), time.process_time()
    error, is_good = "", False
    for _ in range(N_WALKS):
        at, n_tokens = matcher.copy(), 0
        while n_tokens < WALK_TOKENS and not at.is_complete:
            if time.process_time() - start_s > WALKS_S:
                break
            token = _some_token(at.mask(), chance)
            if token is None or not at.accept(token):
                break
            n_tokens += 1
        is_good |= n_tokens > 0
        error = at.error or error
    return "" if is_good else error


def _some_token(mask: bytes, chance: random.Random) -> int | None:
    """A random token of a mask, from a random byte of it on; None if it is empty."""
    start = chance.randrange(len(mask))
    for at in (*range(start, len(mask)), *range(start)):
        if mask[at]:
            bits = [bit for bit in range(8) if mask[at] >> bit & 1]
            return int(8 * at + chance.choice(bits))
    return None
