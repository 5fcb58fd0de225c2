"""Child processes that hold a model: one JSON line in, one JSON line out. Standard library only.

A child waits in `readline` between requests, so the side that is not measured takes no core.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """A child ended, or said that it could not do what it was asked."""


class Worker:
    """The parent's end of a child process. Its messages go to `log`."""

    def __init__(self, python: str, module: str, log: pathlib.Path, **options: Any) -> None:
        self.name, self.log = module, log
        with log.open("ab") as messages:
            self.process = subprocess.Popen(
                [python, "-m", module], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages,
                text=True,
            )  # fmt: skip
        self.ready: Any = self.ask(**options)

    def ask(self, **request: Any) -> Any:
        """The child's answer. Raises WorkerError with the end of its log."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise WorkerError(f"{self.name} ended with {self.process.wait()}; the end of {self.log}:\n{tail}")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(prepare: Callable[..., tuple[Any, Callable[..., Any]]]) -> None:
    """The child's loop: the first line goes to `prepare`, which returns its answer and what answers all others.

    Whatever else is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    handle: Callable[..., Any] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if handle is None:
            answer, handle = prepare(**request)
        else:
            answer = handle(**request)
        answers.write(json.dumps(answer) + "\n")


Row = tuple[int, int, int, bool]
"""Token id, position, slot, whether logits are wanted."""


def continuous(
    step: Callable[[Sequence[Row]], list[int]],
    free: Callable[[int], None],
    prompts: Sequence[Sequence[int]],
    output_lens: Sequence[int],
    slots: int,
    max_tokens: int,
) -> Mapping[str, float]:
    """Serve all requests through `step`, as a server with `slots` does: free slots take the next whole prompts.

    step: rows → greedy token of each row that wants logits. Seconds and tokens of steps that decode all that run and
    prefill nothing, of the first step, and of everything.
    """
    waiting = deque(range(len(prompts)))
    running: dict[int, list[int]] = {}  # slot → [token, position, tokens to come]
    decode_s, n_decoded, first_s, n_out = 0.0, 0, 0.0, 0
    begin_s = time.perf_counter()
    while waiting or running:
        rows = [(token, position, slot, True) for slot, (token, position, _) in running.items()]
        n_old = len(rows)
        for slot in range(slots):
            if slot in running or not waiting or len(rows) + len(prompts[waiting[0]]) > max_tokens:
                continue
            request = waiting.popleft()
            last = len(prompts[request]) - 1
            rows += [(token, place, slot, place == last) for place, token in enumerate(prompts[request])]
            running[slot] = [0, last, output_lens[request]]
        step_s = time.perf_counter()
        tokens = step(rows)
        took_s = time.perf_counter() - step_s
        first_s = first_s or took_s
        if len(rows) == n_old:
            decode_s, n_decoded = decode_s + took_s, n_decoded + n_old
        wanted = [slot for _, _, slot, wants in rows if wants]
        n_out += len(wanted)
        for slot, token in zip(wanted, tokens, strict=True):
            _, position, left = running[slot]
            running[slot] = [token, position + 1, left - 1]
            if left == 1:
                del running[slot]
                free(slot)
    return {
        "first_s": first_s, "decode_s": decode_s, "n_decoded": n_decoded,
        "total_s": time.perf_counter() - begin_s, "n_out": n_out,
    }  # fmt: skip
