"""How many requests `quire simulate` gets through in a second of processor time: 8B shape, one replica, W3's lengths.

    python -m benchmarks.simulate_speed [--against CHECKOUT] [--times 9] [--output FILE]

--against: a checkout of another commit, which runs in turns with this one, so that both see the same busy machine.
Each run is a process of its own with `--rounds` simulations of each rate, of which the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Final

from quire.bench.machine import command_output
from quire.bench.report import build_report, write_report
from quire.bench.shape import FOLDER
from quire.bench.simulate.options import SimulateOptions
from quire.bench.simulate.requests import workload_requests
from quire.bench.simulate.session import Variant
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.engine.simulated import SimulatedMachine

RATES: Final = (20.0, 60.0, math.inf)
LENGTHS: Final = "benchmarks/w3_lengths.json"
RESULTS: Final = pathlib.Path("benchmarks/results/simulate_speed.json")


def requests_per_s(rate: float, n_rounds: int) -> float:
    """Of the fastest round."""
    folder, requests = FOLDER / "llama-3.1-8b", workload_requests("W3", LENGTHS)
    options = SimulateOptions(workload="W3", dataset_path=LENGTHS)
    config = EngineConfig(model=str(folder), max_model_len=4096)
    machine = SimulatedMachine.of(
        config, read_arch(folder), "h200", options.memory_bytes, is_server=not math.isinf(rate)
    )  # fmt: skip
    variant = Variant("as given", options, machine)
    return len(requests) / min(variant.at(requests, rate).cpu_s for _ in range(n_rounds))


def run_once(checkout: pathlib.Path, n_rounds: int) -> dict[str, float]:
    """In a process of its own, with the code of a checkout and this file."""
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--once", "--rounds", str(n_rounds)]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=pathlib.Path, help="a checkout of another commit")
    parser.add_argument("--times", type=int, default=9, help="processes of each checkout (default: 9)")
    parser.add_argument("--rounds", type=int, default=3, help="simulations of a rate in a process (default: 3)")
    parser.add_argument("--output", default=str(RESULTS))
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps({str(rate): requests_per_s(rate, options.rounds) for rate in RATES}))
        return
    checkouts = {"this": pathlib.Path.cwd()} | ({"against": options.against.resolve()} if options.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.times):
        for name, checkout in checkouts.items():
            found[name].append(run_once(checkout, options.rounds))
    results: dict[str, object] = {}
    for name, runs in found.items():
        rates = {rate: round(statistics.median(run[rate] for run in runs)) for rate in runs[0]}
        commit = command_output("git", "-C", str(checkouts[name]), "rev-parse", "--short", "HEAD").strip()
        results[name] = {"commit": commit, "requests_per_cpu_s": rates}
        print(f"{name:<8} {commit}: " + ", ".join(f"{n:,} at {rate}/s" for rate, n in rates.items()))
    settings = {"times": options.times, "rounds": options.rounds, "lengths": LENGTHS}
    write_report(options.output, build_report("simulate_speed", settings, results))


if __name__ == "__main__":
    main()
