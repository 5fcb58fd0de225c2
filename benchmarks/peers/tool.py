"""The built `llama-batched-bench` of ik_llama.cpp as a peer: one process a run, read from the table that it prints."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from benchmarks.peers.lines import WorkerError

COLUMNS = ("n_in", "n_out", "n", "n_kv", "prefill_s", "prefill_rate", "decode_s", "decode_rate", "total_s", "rate")


class IkBench:
    """The end of `lines.Worker` for a tool that loads its model in every run; weights re-interleaved at load (-rtr)."""

    ready = {"weights": "re-interleaved at load"}

    def __init__(self, binary: str, path: str, threads: int) -> None:
        self.command = [binary, "-m", path, "-t", str(threads), "-rtr", "-b", "2048", "-ub", "512"]

    def ask(self, prompts: list[list[int]], output_lens: list[int], **_: Any) -> dict[str, float]:
        """Requests of one length; figures as in `lines.continuous`."""
        n_in, n_out, n = len(prompts[0]), output_lens[0], len(prompts)
        size = ["-c", str(n * (n_in + n_out) + 256), "-npp", str(n_in), "-ntg", str(n_out), "-npl", str(n)]
        done = subprocess.run([*self.command, *size], capture_output=True, text=True, check=False)
        text = done.stdout + done.stderr
        cells = re.findall(r"^\|((?: *[\d.]+ *\|){10})", text, re.MULTILINE)
        if done.returncode != 0 or len(cells) != 1:
            raise WorkerError(f"{self.command[0]} ended with {done.returncode}: {text[-2000:]}")
        row = dict(zip(COLUMNS, map(float, cells[0].split("|")[:-1]), strict=True))
        return {
            "first_s": row["prefill_s"], "decode_s": row["decode_s"], "n_decoded": n * n_out,
            "total_s": row["total_s"], "n_out": n * n_out,
        }  # fmt: skip

    def close(self) -> None:
        """Nothing is kept between runs."""
