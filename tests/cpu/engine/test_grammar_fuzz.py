"""A few hundred of the cases of `grammar_fuzz.py`, which runs as many as one likes."""

from __future__ import annotations

import pytest
from grammar_fuzz import KINDS, MARK, Fuzz
from test_structured_output import settings

from quire.engine.grammars.processes import GrammarProcesses

N_CASES = 40


def test_any_constraint_passes_or_is_the_requests_fault(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fuzz = Fuzz(GrammarProcesses(settings(compile_s=0.5)), seed=7)
    for kind in KINDS:
        fuzz.run(kind, N_CASES)
    fuzz.close()
    assert sum(fuzz.outcomes.values()) == N_CASES * len(KINDS)
    assert all(fuzz.outcomes[f"{kind}: {one}"] for kind in KINDS for one in ("passed", "refused")), fuzz.outcomes
    said = capfd.readouterr()
    assert MARK not in said.out + said.err + caplog.text
