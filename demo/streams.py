"""Owns the training data as token streams, and the random windows that are cut from them.

Two streams: the corpus (documents apart by `<|endoftext|>`) and the dialogues, each token with its weight in the
loss. A window of dialogues starts where a dialogue starts, as in use.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import corpus
from .chat import END_OF_TEXT, TURN_END, TURN_START
from .dialogues import conversations

PROMPT_WEIGHT = 0.1  # of tokens that the model reads in use, next to 1 for those it writes
CHUNK = 4000  # dialogues a job
_TOKENIZERS: dict[str, Tokenizer] = {}


@dataclass
class Stream:
    """Token ids [n], weights in the loss [n] and the places where a document starts [m], on one device."""

    tokens: Tensor
    weights: Tensor
    starts: Tensor

    def windows(self, n: int, length: int, at_start: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`n` windows of `length` + 1 tokens and their weights; a share `at_start` of them begins with a document."""
        device = self.tokens.device
        last = self.tokens.numel() - length - 1
        first = torch.randint(last, (n,), generator=generator, device=device)
        aligned = self.starts[torch.randint(self.starts.numel(), (n,), generator=generator, device=device)].clamp(
            max=last
        )
        chosen = torch.rand(n, generator=generator, device=device) < at_start
        index = torch.where(chosen, aligned, first)[:, None] + torch.arange(length + 1, device=device)
        return self.tokens[index].long(), self.weights[index]


def _weights(tokens: np.ndarray, header: np.ndarray, turn_start: int, turn_end: int) -> np.ndarray:
    """1 for what the assistant writes, its end mark included, PROMPT_WEIGHT for the rest.

    ..., start, "assistant", "\\n", [w, w, ..., end], "\\n", start, ...   (brackets: weight 1)
    """
    place = np.arange(tokens.size)
    own = np.ones(tokens.size, bool)
    for i, token in enumerate(header):
        own[: tokens.size - i] &= tokens[i:] == token
    last_start = np.maximum.accumulate(np.where(tokens == turn_start, place, 0))
    last_end = np.maximum.accumulate(np.where(tokens == turn_end, place, -1))
    before = np.concatenate(([-1], last_end[:-1]))  # the last end strictly before this token
    written = own[last_start] & (place >= last_start + header.size) & (before < last_start)
    return np.where(written, 1.0, PROMPT_WEIGHT).astype(np.float16)


def _tokenizer(path: str) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return _TOKENIZERS.setdefault(path, Tokenizer.from_file(path))


def _dialogue_job(job: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
    path, seed = job
    tokenizer = _tokenizer(path)
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = [e.ids for e in tokenizer.encode_batch_fast(list(conversations(seed, CHUNK)))]
    lengths = np.array([len(ids) + 1 for ids in encoded])
    tokens = np.concatenate([np.array([*ids, end], np.int16) for ids in encoded])
    return tokens, np.concatenate(([0], np.cumsum(lengths)[:-1]))


def _corpus_job(job: tuple[str, list[str]]) -> list[np.ndarray]:
    path, texts = job
    tokenizer = _tokenizer(path)
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [np.array([*e.ids, end], np.int16) for e in tokenizer.encode_batch_fast(texts)]


def corpus_stream(
    documents: list[corpus.Document], tokenizer_path: Path, pool: ProcessPoolExecutor, device: str
) -> Stream:
    """The training documents, once each."""
    chosen = [d.text for d in documents if not d.held_out]
    jobs = [(str(tokenizer_path), chosen[i : i + 64]) for i in range(0, len(chosen), 64)]
    parts = [tokens for batch in pool.map(_corpus_job, jobs) for tokens in batch]
    starts = np.cumsum([0, *(part.size for part in parts[:-1])])
    tokens = torch.from_numpy(np.concatenate(parts)).to(device)
    return Stream(
        tokens,
        torch.ones(1, dtype=torch.float16, device=device).expand(tokens.numel()),
        torch.from_numpy(starts).to(device),
    )


def dialogue_stream(n_dialogues: int, tokenizer_path: Path, pool: ProcessPoolExecutor, device: str) -> Stream:
    """About `n_dialogues` dialogues, made and encoded in parallel."""
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    jobs = [(str(tokenizer_path), 1000 + i) for i in range(max(1, n_dialogues // CHUNK))]
    results = list(pool.map(_dialogue_job, jobs))
    tokens = np.concatenate([part for part, _ in results])
    offsets = np.cumsum([0, *(part.size for part, _ in results[:-1])])
    starts = np.concatenate([s + o for (_, s), o in zip(results, offsets, strict=True)])
    header = np.array(tokenizer.encode(f"{TURN_START}assistant\n").ids)
    weights = _weights(tokens, header, tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END))
    return Stream(
        torch.from_numpy(tokens).to(device), torch.from_numpy(weights).to(device), torch.from_numpy(starts).to(device)
    )
