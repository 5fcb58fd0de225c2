"""Texts for `quire quantize` and `quire bench tradeoffs` of the demo model, from its corpus.

    python -m benchmarks.held_out_texts FOLDER

Writes code.txt, tests.txt and docs.txt of held-out documents, calibration.txt of documents that it was trained on, and
tasks.jsonl: held-out questions of each of the demo's tasks, arithmetic, units, dates, JSON extraction and tool calls.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from typing import Any

from demo import corpus
from demo.dialogues import TASKS, prompt_of, task_examples
from demo.measures import DAYS

KINDS = ("code", "tests", "docs")


def text_of(documents: list[corpus.Document], n_bytes: int) -> str:
    """The beginnings of documents, alike, of n_bytes in all."""
    most = 8_000
    parts = [document.text[:most] for document in documents]
    return "\n".join(parts)[:n_bytes]


PATTERNS = {
    "last number": r"-?\d+", "first number": r"\A[^\d-]*(-?\d+)", "last weekday": "|".join(DAYS),
    "call": r"(?s)\A<tool_call>\n(.*)\n</tool_call>\Z", "equal": "", "json": "",
}  # fmt: skip
"""What of a reply is compared, by how the demo compares it; where it has to contain the answer, the answer itself."""


def task_lines(n: int) -> list[str]:
    """n held-out questions of each of the demo's tasks, as `quire bench tradeoffs --tasks` reads them."""
    lines = []
    for name, (_, how) in TASKS.items():
        for example in task_examples(name, n):
            is_json = how in ("json", "call")
            answer: Any = example.answer if is_json else str(example.answer)
            pattern = re.escape(answer) if how == "contains" else PATTERNS[how]
            line = {"task": name, "prompt": prompt_of(example), "answer": answer, "pattern": pattern}
            lines.append(json.dumps(line, ensure_ascii=False))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--bytes", type=int, default=100_000, help="of each held-out text")
    parser.add_argument("--examples", type=int, default=20, help="questions of each task")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.load(None)
    for kind in KINDS:
        held_out = [one for one in documents if one.held_out and one.kind == kind]
        (args.folder / f"{kind}.txt").write_text(text_of(held_out, args.bytes))
    seen = [[one for one in documents if not one.held_out and one.kind == kind] for kind in KINDS]
    calibration = "\n".join(text_of(own, 3 * args.bytes) for own in seen)
    (args.folder / "calibration.txt").write_text(calibration)
    (args.folder / "tasks.jsonl").write_text("\n".join(task_lines(args.examples)) + "\n")


if __name__ == "__main__":
    main()
