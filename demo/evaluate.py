"""Owns the measurements: bits per byte on held-out files, and accuracy on held-out generated tasks.

Run `python -m demo.evaluate` to measure the files in `quire/_models` and print the results as JSON.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from . import checkpoint, corpus
from .chat import CHAT_TEMPLATE, END_OF_TEXT, TURN_END
from .dialogues import TASKS, prompt_of, task_examples
from .measures import DAYS
from .model import Llama

MODELS = Path(__file__).resolve().parent.parent / "quire" / "_models"
"""The models that ship inside the package."""
CONTEXT, STRIDE = 2048, 1024
BATCH = 100
MAX_NEW_TOKENS = 160

Reply = tuple[list[int], list[int]]  # prompt ids, reply ids


@torch.no_grad()
def generate(folder: Path, tokenizer: Tokenizer, prompts: list[str], device: str) -> list[Reply]:
    """Greedy replies by transformers, in batches of prompts of like length (padded on the left)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ends = {tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)}
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    replies: list[list[int]] = [[] for _ in rows]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        width = max(len(rows[i]) for i in part)
        padded = torch.tensor([[0] * (width - len(rows[i])) + rows[i] for i in part], device=device)
        mask = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in part], device=device)
        settings = GenerationConfig(
            max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=sorted(ends), pad_token_id=0
        )
        written = model.generate(input_ids=padded, attention_mask=mask, generation_config=settings)[:, width:].tolist()
        for i, ids in zip(part, written, strict=True):
            stop = next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))
            replies[i] = ids[:stop]
    return list(zip(rows, replies, strict=True))


def _numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(text: str) -> Any:
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text.strip(), re.DOTALL)
    return _parsed(found[1]) if found else None


def _last_weekday(text: str) -> str | None:
    found = re.findall("|".join(DAYS), text)
    return found[-1] if found else None


COMPARE: dict[str, Callable[[str, Any], bool]] = {
    "last number": lambda text, answer: _numbers(text)[-1:] == [str(answer)],
    "first number": lambda text, answer: _numbers(text)[:1] == [str(answer)],
    "last weekday": lambda text, answer: _last_weekday(text) == answer,
    "contains": lambda text, answer: answer in text,
    "equal": lambda text, answer: text.strip() == answer,
    "json": lambda text, answer: _parsed(text) == answer,
    "call": lambda text, answer: _call(text) == answer,
}


def accuracy(folder: Path, tokenizer: Tokenizer, n: int, device: str) -> tuple[dict[str, Any], list[Reply]]:
    """For each task: how many of `n` held-out examples the model answers right. All replies, for `agreement`."""
    results: dict[str, Any] = {}
    everything: list[Reply] = []
    for name, (_, how) in TASKS.items():
        examples = task_examples(name, n)
        replies = generate(folder, tokenizer, [prompt_of(e) for e in examples], device)
        everything += replies
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in replies]
        right = [COMPARE[how](text, e.answer) for text, e in zip(texts, examples, strict=True)]
        results[name] = {"n": n, "correct": sum(right), "accuracy": sum(right) / n}
        if how in ("json", "call"):
            parse = _parsed if how == "json" else _call
            valid = [isinstance(parse(text), dict) for text in texts]
            results[name]["valid_json"] = sum(valid) / n
        wrong = [(text, e.answer) for text, e, ok in zip(texts, examples, right, strict=True) if not ok]
        results[name]["wrong_examples"] = [{"reply": text[:300], "expected": answer} for text, answer in wrong[:3]]
    return results, everything


@torch.no_grad()
def bits_per_byte(model: Llama, tokenizer: Tokenizer, documents: list[corpus.Document], device: str) -> dict[str, Any]:
    """Held-out bits per byte by kind: windows of CONTEXT tokens, each scored once after at least STRIDE others."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    results: dict[str, Any] = {}
    for kind in ("code", "tests", "docs"):
        chosen = [d for d in documents if d.held_out and d.kind == kind]
        total, n_bytes = 0.0, 0
        for document in chosen:
            ids = [end, *tokenizer.encode(document.text).ids]
            n_bytes += len(document.text.encode())
            scored = 1
            while scored < len(ids):
                stop = min(len(ids), CONTEXT if scored == 1 else scored + STRIDE)
                start = max(0, stop - CONTEXT)
                window = torch.tensor(ids[start:stop], device=device)[None]
                losses = F.cross_entropy(model(window[:, :-1])[0].float(), window[0, 1:], reduction="none")
                total += losses[scored - start - 1 :].sum().item()
                scored = stop
        packed = len(lzma.compress("".join(d.text for d in chosen).encode(), preset=9 | lzma.PRESET_EXTREME))
        bits = total / math.log(2) / max(1, n_bytes)
        results[kind] = {
            "documents": len(chosen),
            "bytes": n_bytes,
            "bits_per_byte": bits,
            "xz_bits_per_byte": 8 * packed / max(1, n_bytes),
        }
    return results


@torch.no_grad()
def agreement(main: Llama, draft: Llama, replies: list[Reply], device: str) -> float:
    """The share of the main model's greedy reply tokens that the draft, given the same text, would have chosen too."""
    same = total = 0
    for start in range(0, len(replies), 128):
        part = sorted(replies, key=lambda r: len(r[0]) + len(r[1]))[start : start + 128]
        width = max(len(p) + len(r) for p, r in part)
        batch = torch.zeros(len(part), width, dtype=torch.long)
        wanted = torch.full((len(part), width), -1, dtype=torch.long)
        for row, (prompt, reply) in enumerate(part):
            batch[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            wanted[row, len(prompt) - 1 : len(prompt) + len(reply) - 1] = torch.tensor(reply)
        guess: Tensor = draft(batch.to(device)).argmax(-1).cpu()
        same += int((guess == wanted).sum())
        total += int((wanted >= 0).sum())
    return same / max(1, total)


def template_agrees(n: int = 60) -> bool:
    """Whether `render` and the Jinja template give the same text for `n` held-out prompts."""
    import jinja2

    from .chat import render

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(CHAT_TEMPLATE)
    for name in TASKS:
        for example in task_examples(name, max(1, n // len(TASKS))):
            messages = example.messages
            if example.system is not None:
                messages = [{"role": "system", "content": example.system}, *messages]
            for opened in (False, True):
                ours = render(messages, example.tools or None, opened)
                if (
                    template.render(messages=messages, tools=example.tools or None, add_generation_prompt=opened)
                    != ours
                ):
                    return False
    return True


def draft_folder(models: Path) -> Path:
    """Where the draft model of `models` is: here beside the scripts for the bundled ones, since it does not ship."""
    return Path(__file__).resolve().parent / "draft" if models == MODELS else models / "draft"


def measure(models: Path, documents: list[corpus.Document], n: int, device: str) -> dict[str, Any]:
    """All measurements of the two models as stored under `models`."""
    tokenizer = Tokenizer.from_file(str(models / "demo" / "tokenizer.json"))
    main = checkpoint.load(models / "demo").to(device).eval()
    draft = checkpoint.load(draft_folder(models)).to(device).eval()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        tasks, replies = accuracy(models / "demo", tokenizer, n, device)
        return {
            "template_agrees": template_agrees(),
            "main": {
                "parameters": main.n_parameters(),
                "held_out": bits_per_byte(main, tokenizer, documents, device),
                "tasks": tasks,
            },
            "draft": {
                "parameters": draft.n_parameters(),
                "held_out": bits_per_byte(draft, tokenizer, documents, device),
                "agreement_on_replies": agreement(main, draft, replies, device),
            },
        }


def write(results: Path, measured: dict[str, Any]) -> None:
    """Put the measurements into the results file, beside what training wrote there."""
    kept = json.loads(results.read_text()) if results.exists() else {}
    results.write_text(json.dumps({**kept, **measured}, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Measure the stored models and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument(
        "--stdlib", type=Path, help="standard library to take the held-out files from (default: this Python's)"
    )
    parser.add_argument("--n", type=int, default=100, help="examples of each task")
    parser.add_argument("--results", type=Path, help="results file to put them into as well")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measured = measure(args.models, corpus.load(args.stdlib), args.n, device)
    print(json.dumps(measured, indent=2, ensure_ascii=False))
    if args.results:
        write(args.results, measured)


if __name__ == "__main__":
    main()
