"""Trains an EAGLE-3 head for the demo model on a CPU in minutes: `python -m demo.train_head --minutes 12`.

With `--mtp` a multi-token prediction module. Either learns the model's own distributions over the text that the model
was trained on, for several guesses in a row. The learning rate follows the clock, so that the run ends within
`--minutes` on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from . import checkpoint, corpus, evaluate, head, mtp
from .model import Llama, Shape
from .streams import Stream, corpus_stream, dialogue_stream
from .train import rate_at

SHAPE = Shape(hidden=256, layers=1, heads=4, kv_heads=2, intermediate=256, vocabulary=1024)
BATCH_TOKENS = 2048
LENGTH, LONG_LENGTH, LONG_SHARE = 512, 1024, 0.15  # of a window; of the time, at the end, with long ones
CORPUS_SHARE = 0.5  # of the windows of a batch
N_DIALOGUES = 40_000
STEPS, STEP_WEIGHT = 3, 0.8  # guesses in a row, and the weight of each next to the one before
RATE = 2e-3
MEASURED = 24  # batches
FOLDER = Path(__file__).parent


class Batches:
    """Windows of both streams."""

    def __init__(self, corpus_part: Stream, dialogues: Stream, seed: int) -> None:
        self.parts = (corpus_part, dialogues)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, length: int) -> tuple[Tensor, Tensor]:
        """Tokens [rows, length + 1], and the weight of each token that is guessed."""
        rows = BATCH_TOKENS // length
        n_corpus = round(CORPUS_SHARE * rows)
        counts = n_corpus, rows - n_corpus
        both = [
            part.windows(n, length, share, self._generator)
            for part, n, share in zip(self.parts, counts, (0.25, 1.0), strict=True)
        ]
        tokens, weights = (torch.cat(parts) for parts in zip(*both, strict=True))
        return tokens, weights.float()


def losses(
    learner: head.Drafting, model: Llama, tokens: Tensor, weights: Tensor
) -> tuple[Tensor, list[tuple[float, float]]]:
    """The loss of a batch, and of each guess (rows that it is right at if those before it were, rows)."""
    length = tokens.shape[1] - 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            states = head.model_states(model, tokens[:, :-1])
            wanted, best = states.logits.float().softmax(-1)[..., learner.chosen], states.logits.argmax(-1)
        guesses = learner(states, (model.cos[:length], model.sin[:length]), STEPS)
    total, counts, right = torch.zeros(()), [], torch.ones_like(best, dtype=torch.bool)
    for step, guess in enumerate(guesses):
        n = length - step
        weight = weights[:, 1 + step :]
        scores = guess[:, :n].float().log_softmax(-1)
        total = total - STEP_WEIGHT**step * ((wanted[:, step:] * scores).sum(-1) * weight).sum() / weight.sum()
        before, is_written = right[:, :n], weight == 1
        right = before & (learner.chosen[scores.argmax(-1)] == best[:, step:])
        counts.append((float((right & is_written).sum()), float((before & is_written).sum())))
    return total, counts


def measure(learner: head.Drafting, model: Llama, batches: Batches) -> list[float]:
    """Of each guess the share that is right where those before it were, on what the model writes."""
    sums = torch.zeros(STEPS, 2)
    with torch.no_grad():
        for _ in range(MEASURED):
            sums += torch.tensor(losses(learner, model, *batches.next(LONG_LENGTH))[1])
    return [round(right / max(rows, 1.0), 3) for right, rows in sums.tolist()]


def frequent(streams: tuple[Stream, Stream], n: int, n_ids: int) -> tuple[Tensor, float]:
    """The `n` ids that the model writes most often in both kinds of text, rising, and their share of what it writes."""
    shares = torch.zeros(n_ids, dtype=torch.float64)
    for stream in streams:
        written = stream.tokens[stream.weights == 1].long()
        shares += torch.bincount(written, minlength=n_ids).double() / len(written) / len(streams)
    chosen = shares.topk(n).indices.sort().values
    return chosen, float(shares[chosen].sum())


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=12, help="time for the training itself")
    parser.add_argument("--mtp", action="store_true", help="a multi-token prediction module in place of the head")
    parser.add_argument("--out", type=Path, help="folder; none: the demo's own")
    parser.add_argument("--start", type=Path, help="folder of a head to go on with")
    parser.add_argument("--results", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = checkpoint.load(evaluate.MODELS / "demo").requires_grad_(False)
    path = evaluate.MODELS / "demo" / "tokenizer.json"
    documents = corpus.load(None)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        streams = corpus_stream(documents, path, pool, "cpu"), dialogue_stream(N_DIALOGUES, path, pool, "cpu")
    n_ids = model.shape.vocabulary if args.mtp else SHAPE.vocabulary
    chosen, share = frequent(streams, n_ids, model.shape.vocabulary)
    print(f"{[len(stream.tokens) for stream in streams]} tokens; {len(chosen)} ids are {share:.1%} of them", flush=True)
    batches = Batches(*streams, seed=3)
    learner = mtp.Mtp(replace(SHAPE, vocabulary=n_ids), model) if args.mtp else head.Head(SHAPE, chosen)
    if args.start:
        head.load_into(learner, model.shape, args.start)
    groups = [
        {"params": [p for p in learner.parameters() if p.dim() == 2], "weight_decay": 0.05},
        {"params": [p for p in learner.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    start, step = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(progress, step)
        length = LONG_LENGTH if progress > 1 - LONG_SHARE else LENGTH
        loss, _ = losses(learner, model, *batches.next(length))
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss is {loss.item()} at step {step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            print(f"step {step} progress {progress:.2f} loss {loss.item():.3f}", flush=True)
        step += 1
    took_s = time.monotonic() - start
    head.save(learner, model.shape, args.out or FOLDER / ("mtp" if args.mtp else "head"))
    right = measure(learner, model, Batches(*streams, seed=4))
    found = {"steps": step, "tokens": step * BATCH_TOKENS, "seconds": round(took_s), "ids": share, "right": right}
    print(json.dumps(found), flush=True)
    if args.results:
        args.results.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
