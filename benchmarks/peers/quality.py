"""Logits and replies of llama.cpp on a checkpoint that is rounded by llama.cpp itself."""

from __future__ import annotations

import pathlib
import sys
import tempfile

import numpy as np
import torch

from benchmarks.peers import models
from benchmarks.peers.lines import Worker

TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
END_IDS = (2, 0)
"""What ends a reply of the demo model."""


class PeerLogits:
    """One GGUF file in llama.cpp; calling it gives float32 logits [1, n, vocabulary] for int64 ids [1, n]."""

    def __init__(self, environment: pathlib.Path, path: pathlib.Path, threads: int) -> None:
        self.n_bytes = path.stat().st_size
        self.folder = tempfile.TemporaryDirectory()
        python, log = str(environment / "bin" / "python"), pathlib.Path(self.folder.name) / "log"
        self.worker = Worker(python, "benchmarks.peers.llama", log, op="load", path=str(path), threads=threads)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        path = f"{self.folder.name}/logits.npy"
        self.worker.ask(op="logits", ids=ids[0].tolist(), path=path)
        return torch.from_numpy(np.load(path))[None]

    def replies(self, prompts: list[list[int]], longest: int) -> list[list[int]]:
        """Greedy token ids after each prompt, without the one that ended it."""
        found: list[list[int]] = self.worker.ask(op="replies", prompts=prompts, longest=longest, ends=END_IDS)
        return found

    def close(self) -> None:
        self.worker.close()
        self.folder.cleanup()


def rounded(environment: pathlib.Path, checkpoint: pathlib.Path, target: pathlib.Path) -> dict[str, pathlib.Path]:
    """GGUF files of a checkpoint folder by type, written to `target`."""
    files = {dtype: target / f"{dtype}.gguf" for dtype in TYPES}
    models.write_gguf(checkpoint, files["BF16"])
    for dtype, path in files.items():
        if dtype != "BF16":
            options = {"source": str(files["BF16"]), "target": str(path), "dtype": dtype, "threads": 2}
            python = str(environment / "bin" / "python")
            Worker(python, "benchmarks.peers.llama", target / "log", op="quantise", **options).close()
    return files


def environment_of(folder: pathlib.Path) -> pathlib.Path:
    """The peer's environment; ends the process with advice when it is not there."""
    environment = folder / "llama"
    if not (environment / "bin" / "python").exists():
        sys.exit(f"llama.cpp is not in {folder}: run python -m benchmarks.cpu_peers --install first")
    return environment
