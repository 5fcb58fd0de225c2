"""Owns the comparison of the draft's shape with and without a teacher: the same start, batches, steps and rates.

`python -m demo.distillation --minutes 20 --out FOLDER` trains both on a CPU, step by step, and writes `with-teacher`
and `without-teacher` into the folder. The bundled demo model is the teacher.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import checkpoint, corpus, evaluate
from . import tokenizer as tokenizers
from .model import DRAFT, Llama
from .streams import corpus_stream, dialogue_stream
from .train import Batches, optimizer_of, rate_at, teacher_loss, token_loss

BATCH_TOKENS, LENGTH, RATE = 2048, 256, 2e-3
N_DIALOGUES = 24_000
LOG_STEPS = 25


class Student:
    """A model with its optimizer, and the processor time that its steps took."""

    def __init__(self, model: Llama) -> None:
        self.model, self.optimizer = model, optimizer_of(model, RATE, "cpu")
        self.cpu_s, self.loss = 0.0, 0.0

    def step(self, batch: tuple[Tensor, Tensor, Tensor], teacher: Llama | None, rate: float) -> None:
        """One step on inputs, targets and weights [rows, length]; a teacher's distributions stand for the targets."""
        begin_s = time.process_time()
        inputs, targets, weights = batch
        embedding = self.model.model.embed_tokens.weight
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.hidden_states(inputs)
            if teacher is None:
                loss = token_loss(hidden, embedding, targets, weights)
            else:
                with torch.no_grad():
                    known = teacher.hidden_states(inputs)
                loss = teacher_loss(hidden, embedding, known, teacher.model.embed_tokens.weight.detach(), weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()
        self.cpu_s += time.process_time() - begin_s


def train(teacher: Llama, batches: Batches, seconds: float) -> tuple[dict[str, Student], int]:
    """The two students by name, and the steps that each of them made. The learning rate follows the clock of both."""
    torch.manual_seed(0)
    alone = Llama(DRAFT)
    students = {"with-teacher": Student(copy.deepcopy(alone)), "without-teacher": Student(alone)}
    start_s, step = time.monotonic(), 0
    while (progress := (time.monotonic() - start_s) / seconds) < 1:
        batch, rate = batches.next(LENGTH), RATE * rate_at(progress, step)
        for name, student in students.items():
            student.step(batch, teacher if name == "with-teacher" else None, rate)
        if step % LOG_STEPS == 0:
            losses = ", ".join(f"{name} {student.loss:.3f}" for name, student in students.items())
            print(f"step {step}, {progress:.0%}: {losses}", flush=True)
        step += 1
    return students, step


def run(minutes: float, folder: Path, n_dialogues: int, n_examples: int, results: Path | None) -> dict[str, Any]:
    """Data, training, files and measurements. results: a file to put them into as `distillation`."""
    place = evaluate.MODELS / "demo"
    learned, documents = Tokenizer.from_file(str(place / "tokenizer.json")), corpus.load()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        streams = [corpus_stream(documents, place / "tokenizer.json", pool, "cpu")]
        streams.append(dialogue_stream(n_dialogues, place / "tokenizer.json", pool, "cpu"))
    print(f"{[stream.tokens.numel() for stream in streams]} tokens of corpus and dialogues", flush=True)
    teacher = checkpoint.load(place).eval().requires_grad_(False)
    students, steps = train(teacher, Batches(streams[0], streams[1], BATCH_TOKENS, "cpu"), minutes * 60)
    found: dict[str, Any] = {"steps": steps, "tokens": steps * BATCH_TOKENS, "batch_tokens": BATCH_TOKENS, "rate": RATE}
    for name, student in students.items():
        tokenizers.save(learned, folder / name)
        checkpoint.save(student.model, learned, folder / name)
        found[name] = {"cpu_s": student.cpu_s, "last_loss": student.loss}
    for name in students if n_examples else ():
        stored = checkpoint.load(folder / name).eval()
        found[name]["held_out"] = evaluate.bits_per_byte(stored, learned, documents, "cpu")
        tasks, _ = evaluate.accuracy(folder / name, learned, n_examples, "cpu")
        found[name]["tasks"] = {task: {key: of[key] for key in ("n", "correct")} for task, of in tasks.items()}
    if results is not None:
        evaluate.write(results, {"distillation": found})
    return found


def main() -> None:
    """Read the command line, train, print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, both together")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two checkpoints")
    parser.add_argument("--dialogues", type=int, default=N_DIALOGUES, help="to make for training")
    parser.add_argument("--examples", type=int, default=0, help="held-out examples of each task; 0: do not evaluate")
    parser.add_argument("--results", type=Path, help="results file to put the figures into as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = run(args.minutes, args.out, args.dialogues, args.examples, args.results)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
