"""Adapters of the demo model loaded and unloaded many times beside requests: memory, files and threads that stay.

    python -m benchmarks.adapter_loads --times 10000 --output loads.json

Ends with an error where the second half of the loads has taken more than `MOST_BYTES`, or files or threads are more.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
import tempfile
import time
from typing import Any, Final

import psutil
import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.bench.report import build_report, write_report
from quire.compute.weights.hub import find_checkpoint
from quire.config.model import read_arch
from quire.config.parameters import matrices

N_FOLDERS, RANK, HELD, EACH = 12, 16, 4, 100
"""Adapters; their rank; names at once; loads between two requests."""
MOST_BYTES: Final = 4 << 20
"""What allocators may keep."""


def write_adapters(root: pathlib.Path, model: pathlib.Path) -> list[pathlib.Path]:
    """Folders in PEFT's layout, of the last product of each feed-forward."""
    targets = ("down_proj",)
    found = []
    for seed in range(N_FOLDERS):
        made, tensors = torch.Generator().manual_seed(seed), {}
        for matrix in matrices(read_arch(model)):
            for name, n_out in matrix.parts:
                if name.endswith(targets):
                    at = f"base_model.model.{name}"
                    tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, matrix.n_in, generator=made) * 0.02
                    tensors[f"{at}.lora_B.weight"] = torch.randn(n_out, RANK, generator=made) * 0.02
        folder = root / f"a{seed}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(targets)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found.append(folder)
    return found


def now(process: psutil.Process) -> dict[str, int]:
    """What the process holds."""
    gc.collect()
    return {"bytes": process.memory_info().rss, "files": process.num_fds(), "threads": process.num_threads()}


def run(times: int, root: pathlib.Path) -> dict[str, Any]:
    """Figures, taken when a half of the loads is done and at the end."""
    model = find_checkpoint("demo")
    folders = write_adapters(root, model)
    llm = LLM(str(model), device="cpu", enable_lora=True, max_loras=2, max_cpu_loras=HELD, max_num_seqs=4)
    adapters, process, seen = llm.engine.adapters, psutil.Process(), []
    params = SamplingParams(temperature=0, max_tokens=4)
    start_s = time.monotonic()
    for number in range(times):
        name, folder = f"n{number}", folders[number % N_FOLDERS]
        adapters.load(name, str(folder))
        if number % EACH == 0:
            llm.generate(["Once"] * 2, params, use_tqdm=False, lora_request=[LoRARequest(name, 1, str(folder)), None])
        adapters.unload(name)
        if number + 1 in (times // 2, times):
            seen.append(now(process))
    seconds = time.monotonic() - start_s
    llm.shutdown()
    return {"times": times, "seconds": round(seconds, 1), "half": seen[0], "end": seen[1]}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=10_000)
    parser.add_argument("--output", help="a JSON report")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.times, pathlib.Path(folder))
    print(json.dumps(found))
    if options.output:
        write_report(options.output, build_report("adapter_loads", {"times": options.times}, found))
    half, end = found["half"], found["end"]
    is_kept = end["bytes"] - half["bytes"] > MOST_BYTES
    return int(is_kept or end["files"] > half["files"] or end["threads"] > half["threads"])


if __name__ == "__main__":
    sys.exit(main())
