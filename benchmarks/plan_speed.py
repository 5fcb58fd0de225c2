"""What `quire plan` of a 671B model over all meshes of 64 GPUs takes: seconds, memory, meshes.

    python -m benchmarks.plan_speed [--times 9] [--output FILE]

Each run is the whole command in a process of its own, its start counted in; the median of all is told. The aim is one
second and 100 MB without torch. That torch stays away, the memory and the meshes are held by a test
(tests/null/cli/test_plan.py); time, which depends on what else a machine does, is held by nobody but this record.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, Final

from quire.bench.report import build_report, write_report

COMMAND: Final = ("plan", "shape:deepseek-v3", "--gpu", "h200", "--count", "64", "--json")
CODE: Final = """
import json, pathlib, sys, time
from quire.cli.command import run
code = run(sys.argv[1:])
status = pathlib.Path('/proc/self/status').read_text()
seen = {'code': code, 'kib': int(status.split('VmHWM:')[1].split()[0]), 'cpu_s': time.process_time(),
        'loaded': sorted({'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules))}
print(json.dumps(seen), file=sys.stderr)
"""
RESULTS: Final = pathlib.Path("benchmarks/results/plan_speed.json")


def planned() -> dict[str, Any]:
    """The command once: what it printed and took, as values."""
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CODE, *COMMAND], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path.cwd())},
    )  # fmt: skip
    seen: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    plan = json.loads(done.stdout)
    return seen | {
        "wall_s": time.perf_counter() - begin_s, "n_meshes": len(plan["meshes"]), "n_refused": len(plan["refused"])
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--output", default=str(RESULTS))
    options = parser.parse_args()
    runs = [planned() for _ in range(options.times)]
    results: dict[str, Any] = {
        name: {"median": round(statistics.median(one[name] for one in runs), 3),
               "least": round(min(one[name] for one in runs), 3), "most": round(max(one[name] for one in runs), 3)}
        for name in ("wall_s", "cpu_s", "kib")
    } | {name: runs[0][name] for name in ("code", "loaded", "n_meshes", "n_refused")}  # fmt: skip
    print(*(f"{name:<10}{value}" for name, value in results.items()), sep="\n")
    write_report(options.output, build_report("plan_speed", {"words": COMMAND, "times": options.times}, results))


if __name__ == "__main__":
    main()
