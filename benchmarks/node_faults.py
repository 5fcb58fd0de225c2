"""Faults of a second node under a server's feet, counted: `python -m benchmarks.node_faults --times 3`.

Makes two network namespaces with a cable between them, without any right but that of making them (`unshare -rn`), and
starts `quire serve` in one and `quire serve --headless` in the other: two stages of the demo model, on the CPU. Each
time requests run, half of them streamed, and a rank of the other node is killed or stopped, its node is killed (and
started again), the cable is cut (and mended), or the engine on node 0 is killed. Records when /health turned red and
green again, when the log named what is lost, what became of the requests, and ranks that are left of the engine before.
Exit code 1 where a fault is seen late, a request gets no end, or anything is left. Needs psutil, iproute2, util-linux.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

import psutil

from benchmarks.rank_faults import ENGINE, N_REQUESTS, RANK, RESULTS, SEEN_S, Server, is_there, named_after
from quire.bench.report import build_report, write_report

INSIDE: Final = "--inside"
FIRST, SECOND = "10.77.0.1", "10.77.0.2"
NAMED: Final = {
    "rank killed": r"rank 1 \(process \d+ on node 1\) ended with SIGKILL",
    "rank stopped": r"rank 1 \(process \d+ on node 1 \(.*\)\) made no progress",
    "node killed": r"node 1 \(.*\) is lost",
    "cable cut": r"node 1 \(.*\) said nothing for 6 s",
    "engine killed": r"the engine process ended with SIGKILL",
}
"""What node 0's log says of each fault."""
DOWN_S: Final = 14.0
"""So long the cable is cut: longer than either node waits for the other."""
REST_S: Final = 1.0
STAGES: Final = ["--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", FIRST]


def run(*words: str) -> None:
    """A command that must succeed."""
    subprocess.run(words, check=True)


class Node:
    """The other node, in a network of its own."""

    def __init__(self, log: pathlib.Path) -> None:
        self._log = log
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        time.sleep(0.5)
        self._enter = ("nsenter", "-t", str(self._holder.pid), "-n")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", str(self._holder.pid))
        run("ip", "addr", "add", f"{FIRST}/24", "dev", "v0")
        run("ip", "link", "set", "v0", "up")
        for words in (
            ("addr", "add", f"{SECOND}/24", "dev", "v1"),
            ("link", "set", "v1", "up"),
            ("link", "set", "lo", "up"),
        ):
            run(*self._enter, "ip", *words)
        self.start()

    def start(self) -> None:
        """Its process, as a service manager would have it."""
        code = "import sys; from quire.cli.main import main; sys.exit(main())"
        command = [*self._enter, sys.executable, "-c", code, "serve", *STAGES, "--node-rank", "1", "--headless"]
        with self._log.open("a") as file:
            self.process = psutil.Popen(command, stdout=file, stderr=file)

    @property
    def rank(self) -> psutil.Process:
        """Of its one rank."""
        return next(each for each in self.process.children(recursive=True) if RANK in each.cmdline())

    def cut(self) -> None:
        """No more packets, and nobody is told."""
        run("ip", "link", "set", "v0", "down")

    def mend(self) -> None:
        """Packets again."""
        run("ip", "link", "set", "v0", "up")

    def close(self) -> int | None:
        """Its exit status, by itself; None if it stays."""
        try:
            return int(self.process.wait(20))
        except psutil.TimeoutExpired:
            self.process.kill()
            return None
        finally:
            self._holder.kill()


def strike(server: Server, node: Node, fault: str) -> None:
    """Do it."""
    match fault:
        case "rank killed":
            node.rank.kill()
        case "rank stopped":
            node.rank.send_signal(signal.SIGSTOP)
        case "node killed":
            node.process.kill()
        case "cable cut":
            node.cut()
        case "engine killed":
            server.processes(ENGINE)[0].kill()


def mend(node: Node, fault: str) -> None:
    """What somebody would do about it."""
    if fault == "node killed":
        time.sleep(REST_S)
        node.process.wait()
        node.start()
    elif fault == "cable cut":
        time.sleep(DOWN_S)
        node.mend()


def once(server: Server, node: Node, fault: str, number: int) -> dict[str, Any]:
    """One fault under load."""
    words = " ".join(f"{fault}{number}{i}" for i in range(60))
    bodies = [
        {"model": "demo", "prompt": f"{i} {words}", "max_tokens": 100, "ignore_eos": True, "stream": i % 2 == 1}
        for i in range(N_REQUESTS)
    ]
    before, at = [node.rank, *server.processes(ENGINE)], server.log.stat().st_size
    with concurrent.futures.ThreadPoolExecutor(N_REQUESTS + 2) as pool:
        asked = [pool.submit(server.ask, body) for body in bodies]
        time.sleep(0.3)
        strike(server, node, fault)
        naming = pool.submit(named_after, server.log, at, NAMED[fault], 2 * SEEN_S)
        mending = pool.submit(mend, node, fault)
        red_s = server.wait(healthy=False)
        green_s = server.wait(healthy=True)
        ends = collections.Counter(each.result() for each in asked)
        named_s = naming.result()
        mending.result()
    said = server.log.read_bytes()[at:].decode(errors="replace")
    stacks = r"what rank 1 on node 1 .* wrote at last follows|the stacks of rank 1 follow.*in run_rank"
    return {
        "fault": fault, "red_s": red_s, "named_s": named_s, "green_s": green_s,
        "has_stack": re.search(stacks, said, re.DOTALL) is not None if fault == "rank stopped" else None,
        "ends": dict(sorted(ends.items())), "left": [f"process {each.pid}" for each in before if is_there(each)],
    }  # fmt: skip


def wrongs(found: dict[str, Any]) -> list[str]:
    """What must not be."""
    name = found["fault"]
    wrong = [f"{name}: {left} is left" for left in found["left"]]
    if found["red_s"] > SEEN_S or found["named_s"] is None or found["named_s"] > SEEN_S:
        wrong.append(f"{name}: red after {found['red_s']:.1f} s, named after {found['named_s']} s")
    if found["has_stack"] is False:
        wrong.append(f"{name}: its stack is not in the log of node 0")
    if sum(found["ends"].values()) != N_REQUESTS or any("cut off" in end or "tokens" in end for end in found["ends"]):
        wrong.append(f"{name}: requests ended with {found['ends']}")
    return wrong


def measure(args: argparse.Namespace, folder: pathlib.Path) -> list[str]:
    """Record all trials; what is wrong with them."""
    node, trials = Node(folder / "node.log"), list[dict[str, Any]]()
    server = Server(STAGES, folder, args.log)
    try:
        print(f"up after {server.wait(healthy=True):.1f} s", flush=True)
        for fault in args.faults:
            for number in range(args.times):
                trials.append(once(server, node, fault, number))
                print(json.dumps(trials[-1]), flush=True)
        server.process.send_signal(signal.SIGINT)
        codes = [server.process.wait(30), node.close()]
    finally:
        server.process.kill()
    wrong = [one for found in trials for one in wrongs(found)]
    wrong += [] if codes == [0, 0] else [f"after Ctrl-C node 0 and node 1 ended with {codes}"]
    settings = {"times": args.times, "faults": args.faults, "cable_cut_s": DOWN_S}
    results = {"trials": trials, "exit_statuses": codes, "wrong": wrong}
    write_report(args.output, build_report("node_faults", settings, results))
    return wrong


def main() -> int:
    if INSIDE not in sys.argv:
        command = ["unshare", "-rn", sys.executable, "-m", "benchmarks.node_faults", INSIDE, *sys.argv[1:]]
        os.execvp("unshare", command)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--faults", nargs="+", choices=NAMED, default=list(NAMED))
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("node_faults.log"))
    parser.add_argument("--output", default=str(RESULTS / "node_faults.json"))
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, it would be in what is started
    with tempfile.TemporaryDirectory() as folder:
        wrong = measure(args, pathlib.Path(folder))
    print("\n".join(wrong) or "every fault was seen in time, and nothing is left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
