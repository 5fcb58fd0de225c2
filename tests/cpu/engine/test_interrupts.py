"""Ctrl-C in the middle of a call of `LLM`: the next call answers as if nothing had been."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import signal

import pytest
from rank_cases import SIZE, checkpoint

from quire import LLM, SamplingParams
from quire.core.plan import StepPlan
from quire.core.result import StepResult
from quire.engine.interrupts import undivided

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = ["one two one two", "three", "four five six", "x", "seven"]


def test_a_call_that_is_interrupted_leaves_nothing(tmp_path: pathlib.Path) -> None:
    llm = LLM(checkpoint("qwen3", tmp_path / "qwen3"), **SIZE)
    expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, LONG, use_tqdm=False)]
    executor = llm.engine.executor
    submit, steps = executor.submit, list[int]()

    def interrupted(plan: StepPlan) -> concurrent.futures.Future[StepResult]:
        steps.append(plan.step)
        if len(steps) == 5:  # it is planned, and the engine has not noted that it is under way
            os.kill(os.getpid(), signal.SIGINT)
        return submit(plan)

    executor.submit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert len(steps) == 5
    outputs = llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == expected
    assert llm.stats().n_running == 0
    llm.shutdown()


def test_a_second_interrupt_is_answered_at_once() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), undivided():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the first waits")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("never")
    assert done == ["the first waits"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
