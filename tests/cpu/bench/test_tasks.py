"""Files of questions: what is read, what is refused, and which replies are right."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from benchmarks.held_out_texts import task_lines
from demo.dialogues import TASKS, task_examples
from demo.evaluate import COMPARE
from quire.bench.tasks import Task, is_right, read_tasks
from quire.core.errors import ConfigError

GOOD = '{"prompt": "1 + 1 =", "answer": "2"}\n'


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", 'is empty: a line is {"prompt"'), (b"\n \n", "is empty"), (b"\xff", "is not UTF-8"),
        (GOOD + "{", "line 2: Input data was truncated"), (GOOD + "\n" + "[1]", "line 3: Expected `object`"),
        (GOOD + '{"prompt": "a"}', "line 2: Object missing required field `answer`"),
        (GOOD + '{"prompt": "a", "answer": 1, "anser": 2}', "line 2: Object contains unknown field `anser`"),
        (GOOD + '{"prompt": "", "answer": 1}', "line 2: its prompt is empty"),
        (GOOD + '{"prompt": "a", "answer": "1", "pattern": "("}', "line 2: missing \\), unterminated"),
        (GOOD + '{"prompt": "a", "answer": "1", "pattern": "(a)(b)"}', "has more than one group"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path: pathlib.Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message):
        read_tasks(str(path))


def test_no_such_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl' cannot be read: No such file"):
        read_tasks(str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    "answer, pattern, reply, right",
    [
        ("4", "", " 4\n", True), ("4", "", "It is 4", False), ("4", r"-?\d+", "2 + 2 = 4.", True),
        ("4", r"-?\d+", "4 is not 5", False), ("4", r"\d", "none", False), ({"a": 1}, "", '{"a": 1}', True),
        ({"a": 1}, "", '{"a": "1"}', False), ({"a": 1}, "", "{", False), (1, r"=(.*)", "x = 1", True),
        (1, "", "true", False), (1, "", "1.0", False),
    ],
)  # fmt: skip
def test_right_replies(answer: Any, pattern: str, reply: str, right: bool) -> None:
    assert is_right(Task("?", answer, pattern), reply) is right


def test_questions_of_the_demo(tmp_path: pathlib.Path) -> None:
    """Right is what the demo's own evaluation calls right, of good replies and of those to other questions."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(task_lines(6)))
    tasks = read_tasks(str(path))
    assert len(tasks) == 6 * len(TASKS)
    for name, (_, how) in TASKS.items():
        examples, own = task_examples(name, 6), [task for task in tasks if task.task == name]
        replies = [example.messages[-1]["content"] or "" for example in examples]
        for example, task in zip(examples, own, strict=True):
            assert [is_right(task, reply) for reply in replies] == [
                COMPARE[how](reply, example.answer) for reply in replies
            ]
