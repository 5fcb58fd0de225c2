"""A step's moves and masks without a model: what the engine waits for while the forward pass of a masked step runs.

    python -m benchmarks.random_vocabulary shape:qwen3-0.6b FOLDER
    python -m benchmarks.grammar_turns FOLDER --batch 256 --processes 1 2 4 12

Each sequence says random tokens that its mask allows, as a model of random weights does.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time

import numpy as np

from benchmarks.constrained import SCHEMAS
from quire.bench.report import build_report, write_report
from quire.core.plan import MASK_WORD_BITS
from quire.core.structured import StructuredOutputsParams
from quire.engine.grammars.links import MatcherLinks
from quire.engine.grammars.processes import GrammarProcesses
from quire.engine.grammars.wire import GrammarSettings
from quire.text.grammar import grammar_of
from quire.text.tokenizer import HfTokenizer


def draw(rng: np.random.Generator, bits: np.ndarray) -> list[int]:
    """A token that each line allows."""
    found = []
    for line in bits:
        at = int(rng.choice(np.flatnonzero(line)))
        word = [bit for bit in range(MASK_WORD_BITS) if int(line[at]) >> bit & 1]
        found.append(MASK_WORD_BITS * at + int(rng.choice(word)))
    return found


def run(folder: pathlib.Path, batch: int, n_processes: int, schema: str, n_turns: int) -> dict[str, float]:
    """Milliseconds a turn: of asking, and until all is answered."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    n_words = -(-len(HfTokenizer.load(folder)) // MASK_WORD_BITS)
    settings = GrammarSettings(str(folder), vocab_size, [0], n_words, batch, n_processes, 60.0, 1 << 32)
    processes = GrammarProcesses(settings)
    links, rng, handles = MatcherLinks(processes), np.random.default_rng(0), list(range(1, batch + 1))
    grammar = grammar_of(StructuredOutputsParams(json=SCHEMAS[schema]))
    for handle in handles:
        links.begin([handle], grammar, 0.002)
    n_begun = 0
    while n_begun < batch:
        n_begun += len(links.begun(1.0))
    links.ask([], handles)
    tokens, asked_ms, taken_ms = draw(rng, links.answer().bits), list[float](), list[float]()
    for _ in range(n_turns):
        moves = [(handle, [token]) for handle, token in zip(handles, tokens, strict=True)]
        begin_s = time.perf_counter()
        links.ask(moves, handles)
        asked_ms.append((time.perf_counter() - begin_s) * 1e3)
        masks = links.answer()
        taken_ms.append((time.perf_counter() - begin_s) * 1e3)
        if masks.ends:
            raise SystemExit(f"sequences ended: {masks.ends[:3]}")
        tokens = draw(rng, masks.bits)
    links.close()
    processes.close()
    return {"ask_ms": statistics.mean(asked_ms), "turn_ms": statistics.mean(taken_ms), "most_ms": max(taken_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 12])
    parser.add_argument("--schema", choices=[*SCHEMAS], default="plain")
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    rows = []
    for batch in options.batch:
        for n_processes in options.processes:
            found = run(options.folder, batch, n_processes, options.schema, options.turns)
            rows.append({"batch": batch, "processes": n_processes, **found})
            figures = ", ".join(f"{name.replace('_ms', '')} {value:.2f} ms" for name, value in found.items())
            print(f"{batch:4d} sequences, {n_processes:2d} processes: {figures}", flush=True)
    if options.output:
        given = {name: str(value) for name, value in vars(options).items()}
        write_report(options.output, build_report("grammar_turns", given, {"rows": rows}))


if __name__ == "__main__":
    main()
