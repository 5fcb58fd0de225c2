"""Edit tasks with drafts and without: a file in the prompt, and its beginning again with another name in it.

    python -m benchmarks.edit_drafts --method ngram suffix --batch-sizes 1 8 32 128 --output-json FILE

The demo model goes on with the copy. Files are this project's own Python. Two engines in one process, in turns, as in
`quire bench speculate`, and every token is compared.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import random
import re
import sys
from typing import Any

import quire
from quire.bench.datasets import BenchRequest
from quire.bench.options import SpeculateOptions
from quire.bench.report import build_report, write_report
from quire.bench.speculate import Pair, compare
from quire.config.engine import EngineConfig
from quire.engine.llm import LLM

BEGUN = 40
"""Tokens of the copy that the prompt has."""
NAMES = ("first", "second", "total", "entry", "source", "target", "part", "amount")


class Edits:
    """Prompts: `input_len` - BEGUN tokens of a file, from a line at random, and BEGUN of the edited copy."""

    def __init__(self, llm: LLM, options: SpeculateOptions, rng: random.Random) -> None:
        self._encode, self._options, self._rng = llm.get_tokenizer().encode, options, rng
        folder = pathlib.Path(quire.__file__).parent
        self._texts = [text for path in sorted(folder.rglob("*.py")) if len(text := path.read_text()) > 3000]

    def draw(self, n: int) -> list[BenchRequest]:
        """`n` of them, from files at random."""
        return [BenchRequest(self._prompt(), self._options.output_len) for _ in range(n)]

    def _prompt(self) -> list[int]:
        text, rng = self._rng.choice(self._texts), self._rng
        lines = text.splitlines(keepends=True)
        shown = "".join(lines[rng.randrange(len(lines) // 2) :])
        name = rng.choice(sorted(set(re.findall(r"\b[a-z_]{4,}\b", shown[:200]))) or ["self"])
        edited = re.sub(rf"\b{name}\b", rng.choice(NAMES), shown)
        original = list(self._encode(shown))[: self._options.input_len - BEGUN]
        return original + list(self._encode("\n\n" + edited))[:BEGUN]


def measure(method: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch size."""
    limits = {"max_num_seqs": args.max_num_seqs, "max_model_len": args.input_len + args.output_len + 16}
    config = EngineConfig(speculative_config={"method": method}, **limits)
    options = SpeculateOptions(input_len=args.input_len, output_len=args.output_len, num_iters=args.num_iters)
    pair, rows = Pair.load(config, -1.0), []
    try:
        for n in args.batch_sizes:
            edits = Edits(pair.plain, options, random.Random(n))
            rows.append({"method": method} | compare(pair, options, n, functools.partial(edits.draw, n)))
            shown = {name: value for name, value in rows[-1].items() if not name.endswith("_s")}
            print({name: round(one, 3) if isinstance(one, float) else one for name, one in shown.items()}, flush=True)
    finally:
        pair.shutdown()
    return rows


def main() -> int:
    """1 if a token was another one with drafts."""
    parser = argparse.ArgumentParser(description="Edit tasks of the demo model with drafts and without.")
    parser.add_argument("--method", nargs="+", default=["ngram", "suffix"], choices=["ngram", "suffix"])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--input-len", type=int, default=300)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=256, help="with room for drafts of the largest batch")
    parser.add_argument("--output-json", default="")
    args = parser.parse_args()
    rows = [row for method in args.method for row in measure(method, args)]
    if args.output_json:
        write_report(args.output_json, build_report("edit_drafts", vars(args), {"cases": rows}))
    return 1 if any(row["same_tokens"] is not True for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
