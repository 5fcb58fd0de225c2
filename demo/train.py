"""Trains the demo model and its draft from nothing: data, tokenizer, both models, files, measurements.

`python -m demo.train` on one GPU; `python -m demo.train --smoke` runs all of it on a CPU with a toy model. The
learning rate follows the clock, so that the run ends within `--minutes` on any device.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from . import checkpoint, corpus, evaluate, tokenizer
from .model import DRAFT, MAIN, TINY, Llama, Shape
from .streams import Stream, corpus_stream, dialogue_stream

CORPUS_SHARE = 0.14  # of the windows in a batch
LONG_SHARE = 0.25  # of the time, at the end, with windows of the full length
DECAY_SHARE = 0.5  # of the time, at the end, in which the learning rate falls
WARMUP_STEPS = 150

Log = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    main: Shape
    draft: Shape
    n_dialogues: int
    batch_tokens: int
    length: int
    long_length: int
    main_rate: float
    draft_rate: float
    n_examples: int
    evaluation_s: float


FULL = Plan(MAIN, DRAFT, 1_200_000, 131_072, 1024, 2048, 3e-3, 4e-3, 300, 80.0)
SMOKE = Plan(TINY, TINY, 8_000, 4096, 256, 512, 3e-3, 3e-3, 4, 20.0)


class Batches:
    """Batches of windows from both streams."""

    def __init__(self, corpus_part: Stream, dialogues: Stream, batch_tokens: int, device: str) -> None:
        self.parts = (corpus_part, dialogues)
        self.batch_tokens = batch_tokens
        self.generator = torch.Generator(device).manual_seed(3)

    def next(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights, each [rows, length]."""
        rows = self.batch_tokens // length
        n = round(rows * CORPUS_SHARE)
        a, a_weights = self.parts[0].windows(n, length, 0.25, self.generator)
        b, b_weights = self.parts[1].windows(rows - n, length, 1.0, self.generator)
        tokens, weights = torch.cat((a, b)), torch.cat((a_weights, b_weights))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), weights[:, 1:].float()


def rate_at(progress: float, step: int) -> float:
    """Warm-up by steps, a plateau, then a fall along 1 - sqrt to nothing (WSD)."""
    fall = max(0.0, (progress - (1 - DECAY_SHARE)) / DECAY_SHARE)
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.0, 1 - math.sqrt(min(1.0, fall)))


def token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy."""
    logits = F.linear(hidden, embedding).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def teacher_loss(
    hidden: Tensor, embedding: Tensor, teacher: Tensor, teacher_embedding: Tensor, weights: Tensor
) -> Tensor:
    """Weighted mean cross-entropy with the teacher's distribution as the target."""
    logits = F.linear(hidden, embedding).float().log_softmax(-1)
    wanted = F.linear(teacher, teacher_embedding).float().softmax(-1)
    return (-(wanted * logits).sum(-1) * weights).sum() / weights.sum()


def optimizer_of(model: Llama, rate: float, device: str) -> torch.optim.AdamW:
    """AdamW with decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")


def fit(
    model: Llama,
    teacher: Llama | None,
    batches: Batches,
    plan: Plan,
    rate: float,
    seconds: float,
    device: str,
    log: Log,
) -> dict[str, float]:
    """Train for `seconds`, on the tokens or on the teacher's distributions. Returns steps, tokens and loss."""
    losses = (
        (torch.compile(token_loss, dynamic=False), torch.compile(teacher_loss, dynamic=False))
        if device == "cuda"
        else (token_loss, teacher_loss)
    )
    optimizer = optimizer_of(model, rate, device)
    weight = model.model.embed_tokens.weight

    def step_loss(length: int) -> Tensor:
        inputs, targets, weights = batches.next(length)
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = model.hidden_states(inputs)
            if teacher is None:
                return losses[0](hidden, weight, targets, weights)
            with torch.no_grad():
                known = teacher.hidden_states(inputs)
            return losses[1](hidden, weight, known, teacher.model.embed_tokens.weight.detach(), weights)

    for length in (plan.length, plan.long_length):  # compile both shapes before the clock starts
        step_loss(length).backward()
    optimizer.zero_grad(set_to_none=True)
    start, step, mean = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * rate_at(progress, step)
        loss = step_loss(plan.long_length if progress > 1 - LONG_SHARE else plan.length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            mean = loss.item()
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss is {mean} at step {step}")
        if step % 400 == 0:
            log(
                f"step {step} progress {progress:.2f} loss {mean:.3f} "
                f"tokens/s {(step + 1) * plan.batch_tokens / (time.monotonic() - start):.0f}"
            )
        step += 1
    seconds = time.monotonic() - start
    return {"steps": step, "tokens": step * plan.batch_tokens, "seconds": seconds, "last_loss": mean}


def build(shape: Shape, device: str) -> Llama:
    """A model with fresh weights; on a GPU its layers are compiled one by one, which is quick."""
    model = Llama(shape).to(device)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def prepare(
    documents: list[corpus.Document], plan: Plan, folder: Path, device: str, log: Log
) -> tuple[Tokenizer, Batches]:
    """Train the tokenizer, save it for both models, and encode both streams."""
    smoke = plan is SMOKE
    learned = tokenizer.train(
        tokenizer.training_texts(documents, 4_000 if smoke else 20_000, 1_000_000 if smoke else 16_000_000)
    )
    for place in (folder / "demo", evaluate.draft_folder(folder)):
        tokenizer.save(learned, place)
    log(f"tokenizer: {learned.get_vocab_size()} tokens")
    path = folder / "demo" / "tokenizer.json"
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        corpus_part = corpus_stream(documents[:150] if smoke else documents, path, pool, device)
        log(f"corpus: {corpus_part.tokens.numel()} tokens")
        dialogues = dialogue_stream(plan.n_dialogues, path, pool, device)
    log(f"dialogues: {dialogues.tokens.numel()} tokens, mean weight {dialogues.weights.float().mean().item():.3f}")
    return learned, Batches(corpus_part, dialogues, plan.batch_tokens, device)


def run(plan: Plan, minutes: float, stdlib: Path | None, folder: Path, results: Path) -> None:
    """The whole run, in `minutes`."""
    begin = time.monotonic()

    def log(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    documents = corpus.load(stdlib)
    learned, batches = prepare(documents, plan, folder, device, log)
    prepared_s = time.monotonic() - begin

    left = minutes * 60 - prepared_s - plan.evaluation_s - (32 if device == "cuda" else 0)  # compilation, files
    main, draft = build(plan.main, device), build(plan.draft, device)
    log(f"main {main.n_parameters()} parameters, draft {draft.n_parameters()}; {left:.0f} s to train")
    main_fit = fit(main, None, batches, plan, plan.main_rate, 0.85 * left, device, log)
    checkpoint.save(main, learned, folder / "demo")
    log(f"main: {main_fit}")
    draft_fit = fit(draft, main, batches, plan, plan.draft_rate, 0.15 * left, device, log)
    checkpoint.save(draft, learned, evaluate.draft_folder(folder))
    log(f"draft: {draft_fit}")

    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    training = {
        "hardware": hardware,
        "torch": torch.__version__,
        "data_preparation_s": prepared_s,
        "main": main_fit,
        "draft": draft_fit,
        "corpus_tokens": batches.parts[0].tokens.numel(),
        "dialogue_tokens": batches.parts[1].tokens.numel(),
        "plan": asdict(plan),
        "total_s": time.monotonic() - begin,
    }
    results.write_text(json.dumps({"training": training}, indent=2) + "\n")
    if not plan.n_examples:
        return
    measured = evaluate.measure(folder, documents, plan.n_examples, device)
    evaluate.write(results, measured)
    for name, task in measured["main"]["tasks"].items():
        log(
            f"{name}: {task['accuracy']:.3f}"
            + (f" valid JSON {task['valid_json']:.3f}" if "valid_json" in task else "")
        )
    for which in ("main", "draft"):
        log(
            f"{which} bits per byte: "
            + ", ".join(f"{k} {v['bits_per_byte']:.3f}" for k, v in measured[which]["held_out"].items())
        )
    log(f"draft agreement {measured['draft']['agreement_on_replies']:.3f}, template {measured['template_agrees']}")


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.8, help="time for everything")
    parser.add_argument("--smoke", action="store_true", help="a toy model on little data, to try the script")
    parser.add_argument("--stdlib", type=Path, help="standard library to learn from (default: this Python's)")
    parser.add_argument(
        "--out", type=Path, default=evaluate.MODELS, help="folder for demo/ and draft/ (default: those of the checkout)"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--examples", type=int, help="held-out examples of each task; 0: do not evaluate")
    args = parser.parse_args()
    plan = SMOKE if args.smoke else FULL
    if args.examples is not None:
        plan = replace(plan, n_examples=args.examples, evaluation_s=plan.evaluation_s if args.examples else 0.0)
    run(plan, args.minutes, args.stdlib, args.out, args.results)


if __name__ == "__main__":
    main()
