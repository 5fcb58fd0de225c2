"""Questions with known answers, and how many of them a model answers right.

Owns the file's form and what counts as right. A line of the file is a JSON object:
`{"prompt": text, "answer": value, "pattern": regular expression, "task": name}`, of which the last two may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

MAX_TASKS_BYTES: Final = 1 << 26

Score = tuple[int, int]
"""(right, asked)."""


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question."""

    prompt: str
    """As the model reads it: special tokens written out."""
    answer: Any
    """A text is compared as it is, anything else with the JSON that the reply is."""
    pattern: str = ""
    """What is compared is its last match in the reply, or that of its first group; empty: the whole reply."""
    task: str = "all"
    """Which kind of question it is: kinds are counted apart."""


def read_tasks(path: str) -> list[Task]:
    """The lines of a file. ConfigError, with the number of the line, for what is none."""
    try:
        content = read_regular(path, MAX_TASKS_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"--tasks {shown(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--tasks {shown(path)} is not UTF-8: {error}") from None
    found = [_read_line(path, number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not found:
        raise ConfigError(f'--tasks {shown(path)} is empty: a line is {{"prompt": "...", "answer": ...}}')
    return found


def _read_line(path: str, number: int, line: str) -> Task:
    try:
        task = msgspec.json.decode(line, type=Task)
        if not task.prompt:
            raise ValueError("its prompt is empty")
        if re.compile(task.pattern).groups > 1:
            raise ValueError(f"its pattern {shown(task.pattern)} has more than one group")
    except (msgspec.DecodeError, re.error, ValueError) as error:
        raise ConfigError(f"--tasks {shown(path)}, line {number}: {error}") from None
    return task


def is_right(task: Task, reply: str) -> bool:
    """Whether the reply, without blanks around it, is or contains the answer as the task says."""
    given = reply.strip()
    if task.pattern:
        matches = re.findall(task.pattern, given)
        if not matches:
            return False
        given = matches[-1]
    if isinstance(task.answer, str):
        return given == task.answer
    try:
        value = msgspec.json.decode(given)
    except msgspec.DecodeError:
        return False
    return type(value) is type(task.answer) and bool(value == task.answer)


def answer_tasks(llm: LLM, tasks: Sequence[Task], output_len: int) -> dict[str, Score]:
    """By kind, of greedy replies of at most output_len tokens. A prompt that the model cannot take raises
    RequestError."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len)
    outputs = llm.generate([task.prompt for task in tasks], params, use_tqdm=False)
    found: dict[str, Score] = {}
    for task, output in zip(tasks, outputs, strict=True):
        right, asked = found.get(task.task, (0, 0))
        found[task.task] = right + is_right(task, output.outputs[0].text), asked + 1
    return found
