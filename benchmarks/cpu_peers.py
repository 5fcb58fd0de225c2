"""Quire beside llama.cpp, ik_llama.cpp and transformers on this CPU: alternating pairs, medians, targets.

    python -m benchmarks.cpu_peers --install                    # once: compiles llama-cpp-python, about ten minutes
    python -m benchmarks.cpu_peers --quick                      # a part, in about two minutes
    python -m benchmarks.cpu_peers --lengths w3_lengths.json    # everything
    python -m benchmarks.cpu_peers --only 'qwen.*8-bit decode'  # rows of which "model format measure" matches

A pair runs a peer and then Quire on the same weights, token ids and number of threads; both keep their model loaded
and wait without a core while the other runs. llama.cpp is the package `llama-cpp-python`, compiled for this machine
into an environment under `--folder`. ik_llama.cpp is in no package: give its built `llama-batched-bench` as
`--ik-bench`. Needs the extra `test` (gguf, transformers).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import quire
from benchmarks.peers import models
from benchmarks.peers.lines import ROOT, Worker
from benchmarks.peers.table import FORMATS, HEADER, HF, IK, LLAMA, Measure, Row, measures
from benchmarks.peers.tool import IkBench
from quire.bench.datasets import from_lengths
from quire.bench.machine import n_cores
from quire.bench.report import build_report, write_report

RESULT = pathlib.Path(__file__).with_name("results") / "cpu_peers.json"
FOLDER = pathlib.Path.home() / ".cache" / "quire" / "peers"
DEMO = pathlib.Path(quire.__file__).parent / "_models" / "demo"
PACKAGE = "llama-cpp-python==0.3.36"
BUILD = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
START = """import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_threads=int(sys.argv[2]), verbose=False)
print(model("import os", max_tokens=1)["choices"][0]["text"])"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="compile the peer from its package, and end")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="environment and models (10 GB)")
    parser.add_argument("--models", nargs="+", default=["demo", "qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--only", default="", help="pattern: only matching 'model format measure'")
    parser.add_argument("--peers", nargs="+", default=[LLAMA, IK, HF], choices=(LLAMA, IK, HF))
    parser.add_argument("--ik-bench", default="", help="path of a built llama-batched-bench of ik_llama.cpp")
    parser.add_argument("--lengths", default="", help="lengths file of W3; without it there is no mixed traffic")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=128, help="tokens of a sequence, traffic and demo apart")
    parser.add_argument("--threads", type=int, default=min(2, n_cores()))
    parser.add_argument("--from-gguf", action="store_true", help="Quire reads the peer's file, then rounds it again")
    parser.add_argument("--quick", action="store_true", help="one pair, short outputs, the demo and 0.6B models")
    parser.add_argument("--output", default=str(RESULT))
    args = parser.parse_args()
    if args.quick:
        args.models, args.pairs, args.output_len = [one for one in args.models if "llama" not in one], 1, 32
        args.peers = [one for one in args.peers if one != HF]
    return args


def install(folder: pathlib.Path) -> None:
    """An environment with llama.cpp compiled for this machine."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "llama")], check=True)
    pip = [str(folder / "llama" / "bin" / "pip"), "install", "--no-binary", "llama-cpp-python", PACKAGE]
    environment = os.environ | {"CMAKE_ARGS": BUILD, "CMAKE_BUILD_PARALLEL_LEVEL": str(n_cores())}
    subprocess.run(pip, check=True, env=environment)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process keeps one of our cores busy, as long as this one lives."""
    core = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    loop = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.2)
        yield
    finally:
        loop.kill()
        loop.wait()


class Benchmark:
    """The rows so far, and what it takes to make more."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[Row] = []
        self.versions: dict[str, Any] = {}
        self.log = args.folder / "messages.log"
        self.log.write_text("")
        self.python = str(args.folder / "llama" / "bin" / "python")

    def run(self) -> None:
        """Every model in every format, then the start of a process."""
        print(HEADER, flush=True)
        for model in self.args.models:
            folder = models.checkpoint(self.args.folder / "models", model, DEMO)
            for name in self.args.formats:
                todo = [
                    one for one in measures(model, self.args.quick, self.args.lengths, self.args.output_len)
                    if re.search(self.args.only, f"{model} {name} {one.name}")
                ]  # fmt: skip
                if todo:
                    self.measure(model, folder, name, todo)
            if model == "demo" and re.search(self.args.only, "demo bf16 start"):
                self.start(folder)

    def llama(self, **options: Any) -> Worker:
        return Worker(self.python, "benchmarks.peers.llama", self.log, threads=self.args.threads, **options)

    def file(self, folder: pathlib.Path, dtype: str) -> str:
        """The GGUF file of a type, rounded by llama.cpp itself."""
        path = folder / f"{dtype}.gguf"
        if not path.exists():
            self.llama(op="quantise", source=str(folder / "BF16.gguf"), target=str(path), dtype=dtype).close()
        return str(path)

    def peers(self, folder: pathlib.Path, types: Sequence[str]) -> Iterator[tuple[str, str, Worker | IkBench]]:
        """(peer, its name in the table, its process), each closed before the next is started."""
        for dtype in types[:1] if self.args.quick else types:
            path = self.file(folder, dtype)
            makers = {LLAMA: lambda path=path: self.llama(op="load", path=path)}
            if self.args.ik_bench and folder.name != "demo":
                makers[IK] = lambda path=path: IkBench(self.args.ik_bench, path, self.args.threads)
            if dtype == "BF16" and folder.name != "demo":
                makers[HF] = lambda: Worker(
                    sys.executable, "benchmarks.peers.hf", self.log, model=str(folder), threads=self.args.threads
                )
            for peer, make in makers.items():
                if peer in self.args.peers:
                    worker = make()
                    yield peer, peer if peer == HF else f"{peer} {dtype}", worker
                    worker.close()

    def measure(self, model: str, folder: pathlib.Path, name: str, todo: Sequence[Measure]) -> None:
        """Measures of a model in one format against every peer."""
        quantization, types = FORMATS[name]
        source = self.file(folder, types[0]) if self.args.from_gguf else str(folder)
        options = {"model": source, "quantization": quantization, "skip_tokenizer_init": True, "max_model_len": 1024}
        if models.has_experts(model):
            types = ("Q4_0",)
            options |= {"model": str(models.FOLDER / model), "load_format": "dummy"}
        ours = Worker(sys.executable, "benchmarks.peers.ours", self.log, threads=self.args.threads, **options)
        self.versions["quire"] = ours.ready
        for peer, label, worker in self.peers(folder, types):
            self.versions[peer] = worker.ready
            for one in todo:
                if peer in one.peers:
                    row = Row(model, name, one.name, label, "tok/s", one.targets.get((name, peer)), one.least)
                    with busy_core() if one.busy else contextlib.nullcontext():
                        self.fill(row, one, worker, ours)
        ours.close()

    def fill(self, row: Row, one: Measure, worker: Worker | IkBench, ours: Worker) -> None:
        """The pairs of a row, after a short run of each side. No prompt comes twice, or Quire would have it cached."""
        dataset = from_lengths(list(one.lengths), 4000, seed=f"{row.model}/{row.measure}/{row.peer}")
        for repetition in range(-1, self.args.pairs):
            requests = dataset(repetition)
            longest = 1024 if repetition >= 0 else 4
            request = {
                "op": "run", "slots": one.slots, "unified": one.unified,
                "prompts": [each.prompt_token_ids for each in requests],
                "output_lens": [min(longest, each.output_len) for each in requests],
            }  # fmt: skip
            theirs, mine = worker.ask(**request), ours.ask(**request)
            if repetition >= 0:
                row.pairs.append((one.rate(theirs), one.rate(mine)))
        self.add(row)

    def start(self, folder: pathlib.Path) -> None:
        """From the start of a process to the first token of the demo model, in seconds."""
        theirs = [self.python, "-c", START, self.file(folder, "BF16"), str(self.args.threads)]
        ours = [sys.executable, "-m", "quire", "generate", "--prompt", "import os", "--max-tokens", "1"]
        row = Row("demo", "bf16", "start to first token", f"{LLAMA} BF16", "s", limit=2.0)
        for repetition in range(-1, self.args.pairs):
            times_s = [time.perf_counter()]
            for command in (theirs, ours):
                subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
                times_s.append(time.perf_counter())
            if repetition >= 0:
                row.pairs.append((times_s[1] - times_s[0], times_s[2] - times_s[1]))
        self.add(row)

    def add(self, row: Row) -> None:
        """Print a finished row and write all that there are."""
        self.rows.append(row.close())
        print(row.line(), flush=True)
        results = {"versions": self.versions, "rows": [dataclasses.asdict(each) for each in self.rows]}
        config = {name: str(value) for name, value in vars(self.args).items()}
        write_report(self.args.output, build_report("cpu_peers", config, results))


def main() -> None:
    args = parse_arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.install:
        install(args.folder)
        return
    if not (args.folder / "llama" / "bin" / "python").exists():
        sys.exit(f"llama.cpp is not in {args.folder}: run with --install first")
    Benchmark(args).run()


if __name__ == "__main__":
    main()
