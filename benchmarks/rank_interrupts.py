"""Ctrl-C at any moment of an engine with ranks: `python -m benchmarks.rank_interrupts --moments 10`.

Starts `quire serve`, or a script with `LLM(...)`, with several ranks on the CPU and the demo model, and sends SIGINT to
its process group, as a terminal does, after another part of the time from the start to the end of a few answers.
Records how long it took to end, its exit status, and what is left: processes, folders with their sockets. Exit code 1
where anything is left or it takes longer than `ENDED_S`. Needs psutil.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any, Final

import psutil

from benchmarks.served import free_port
from quire.bench.report import build_report, write_report

RESULTS: Final = pathlib.Path(__file__).with_name("results")
ENDED_S: Final = 10.0
LONGEST_S: Final = 120.0
LOOK_S: Final = 0.02
SCRIPT: Final = """
import sys
import quire
llm = quire.LLM(device="cpu", max_model_len=1024, tensor_parallel_size=int(sys.argv[1]),
                pipeline_parallel_size=int(sys.argv[2]))
llm.generate(["a", "b", "c"], quire.SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
print("answered", flush=True)
llm.generate(["a", "b", "c"], quire.SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
"""
WAYS: Final = ("serve", "llm")


class Run:
    """One start, in a folder of its own for all temporary files, by which its processes are known."""

    def __init__(self, way: str, ranks: int, stages: int, log: pathlib.Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder, self._log, self._at, self._port = pathlib.Path(self._folder.name), log, 0, free_port()
        if way == "llm":
            command = [sys.executable, "-c", SCRIPT, str(ranks), str(stages)]
        else:
            command = [
                sys.executable, "-m", "quire", "serve", "--device", "cpu", "--max-model-len", "1024", "--port",
                str(self._port), "-tp", str(ranks), "-pp", str(stages),
            ]  # fmt: skip
        self.is_server = way == "serve"
        with log.open("ab") as file:
            self._at = file.tell()
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.folder)},
            )  # fmt: skip

    def has_answered(self) -> bool:
        """Whether the time that is divided into moments is over."""
        if not self.is_server:
            return b"answered" in self._log.read_bytes()[self._at :]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def whole_s(self) -> float:
        """Seconds until then."""
        start_s = time.monotonic()
        while not self.has_answered():
            if time.monotonic() - start_s > LONGEST_S or self.process.poll() is not None:
                raise SystemExit(f"it did not start: see {self._log}")
            time.sleep(LOOK_S)
        return time.monotonic() - start_s

    def interrupt(self) -> tuple[int | None, float]:
        """(exit status, seconds until it has ended)."""
        start_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            return self.process.wait(LONGEST_S), time.monotonic() - start_s
        except subprocess.TimeoutExpired:
            return None, LONGEST_S

    def processes(self) -> list[psutil.Process]:
        """That live, wherever they are by now."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get("TMPDIR") == str(self.folder) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def left(self) -> list[str]:
        """Half a second after the end."""
        time.sleep(0.5)
        found = [f"process {one.pid}: {' '.join(one.cmdline())[-60:]}" for one in self.processes()]
        return found + [f"file {path.name}" for path in self.folder.glob("quire*")]

    def close(self) -> None:
        """End what is left."""
        for one in self.processes():
            one.kill()
        self.process.wait()
        self._folder.cleanup()


def trial(way: str, after_s: float, args: argparse.Namespace) -> dict[str, Any]:
    """One start and its end."""
    run = Run(way, args.ranks, args.stages, args.log)
    try:
        time.sleep(after_s)
        code, ended_s = run.interrupt()
        return {"way": way, "after_s": after_s, "ended_s": ended_s, "exit_status": code, "left": run.left()}
    finally:
        run.close()


def moments(way: str, args: argparse.Namespace) -> list[float]:
    """Evenly from the first to a little after the end."""
    run = Run(way, args.ranks, args.stages, args.log)
    try:
        whole_s = run.whole_s()
    finally:
        run.close()
    return [whole_s * (number + 0.5) / (args.moments - 1) for number in range(args.moments)]


def wrongs(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    name = f"{found['way']} after {found['after_s']:.2f} s"
    wrong = [f"{name}: {left} is left" for left in found["left"]]
    return wrong + ([f"{name}: it ended after {found['ended_s']:.1f} s"] if found["ended_s"] > ENDED_S else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2, help="of each stage")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("rank_interrupts.log"))
    parser.add_argument("--output", default=str(RESULTS / "rank_interrupts.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, it would be in what is started
    trials: list[dict[str, Any]] = []
    for way in args.ways:
        for after_s in moments(way, args):
            trials.append(trial(way, after_s, args))
            print(trials[-1], flush=True)
    wrong = [one for found in trials for one in wrongs(found)]
    results = {"trials": trials, "wrong": wrong}
    settings = {name: value for name, value in vars(args).items() if name not in ("log", "output")}
    write_report(args.output, build_report("rank_interrupts", settings, results))
    print("\n".join(wrong) or "it ended each time, and nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
