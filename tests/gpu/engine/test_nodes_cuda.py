"""Stages on two nodes with GPUs of their own, here two trees of processes that reach each other by sockets alone: they
say what one GPU says, and a rank that is killed on the other node is named."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

import pytest
import torch
from rank_cases import SIZE, answers, checkpoint

from quire import LLM

pytestmark = pytest.mark.gpu
HEAD = "127.0.0.2"
"""The other node reaches it from 127.0.0.1."""
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""As between machines whose network is Ethernet."""
LIMIT_S = 220.0
"""For all of a test, whose own end comes 20 s later."""
STACKS_S = 150.0
"""A node 0 that is not over by then writes where it stands; earlier, where the limit is nearer."""
LEAVE_S = 20.0
"""The other node may take so long to end once the engine has."""
COMMAND = [sys.executable, "-c", "import sys; from quire.cli.main import main; sys.exit(main())", "serve"]
FIRST = """
import faulthandler, json, os, signal, sys
faulthandler.dump_traceback_later(float(sys.argv[3]))
from rank_cases import answers
from quire import LLM, SamplingParams
from quire.core.errors import EngineError
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps(answers(llm)), flush=True)
if sys.argv[4] == "lose":
    lost = llm.engine.ranks.pids[-1]
    os.kill(lost, signal.SIGKILL)
    try:
        while True:
            llm.generate(["one"] * 4, SamplingParams(max_tokens=80, ignore_eos=True), use_tqdm=False)
    except EngineError as error:
        print(json.dumps([lost, str(error)]), flush=True)
llm.shutdown()
os._exit(0)
"""
"""What node 0 runs: the answers of an engine, and, if it is to lose a rank, which and what it says of it."""


class TwoNodes:
    """One engine's; what they print goes to files."""

    def __init__(self, model: str, folder: pathlib.Path, n_each: int, left_s: float, end: str, **options: Any) -> None:
        """n_each: GPUs of a node. left_s: until both are ended. end: "lose" a rank, or "leave"."""
        self.folder, self.end_s = folder, time.monotonic() + left_s
        with socket.create_server((HEAD, 0)) as found:
            port = int(found.getsockname()[1])
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(2 * n_each)))).split(",")
        own = {"nnodes": 2, "master_addr": HEAD, "master_port": port, **options}
        stacks_s = max(1.0, min(STACKS_S, left_s - 15))
        head = [sys.executable, "-c", FIRST, model, json.dumps(own), str(stacks_s), end]
        words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--master-port", str(port), "--headless"]
        self.head = self._start("head", seen[:n_each], head)
        self.node = self._start("node", seen[n_each : 2 * n_each], [*COMMAND, model, *words])

    def _start(self, name: str, gpus: list[str], command: list[str]) -> subprocess.Popen[bytes]:
        shown = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(command, env={**os.environ, **APART, **shown}, stdout=out, stderr=log)

    def said(self) -> list[Any]:
        """What node 0 prints, once it has ended well."""
        while self.head.poll() is None:
            if self.node.poll():  # not 0: that is how it ends with the engine
                self.fail(f"the other node ended with status {self.node.returncode}")
            if time.monotonic() > self.end_s:
                self.fail("the engine did not end in time")
            time.sleep(0.1)
        if self.head.returncode:
            self.fail(f"node 0 ended with status {self.head.returncode}")
        return [json.loads(line) for line in (self.folder / "head.out").read_text().splitlines()]

    def status(self) -> int:
        """That of the other node, which ends with the engine."""
        try:
            return self.node.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.fail(f"the other node has not ended {LEAVE_S:g} s after the engine")

    def fail(self, why: str) -> NoReturn:
        """Of the test, with the end of what both wrote."""
        logs = [f"{name} wrote: {(self.folder / f'{name}.log').read_text()[-6000:]}" for name in ("head", "node")]
        pytest.fail("\n".join([why, *logs]))

    def kill(self) -> None:
        """Both, and with them their ranks."""
        for process in (self.head, self.node):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("name", "n_each"), [("qwen3", 1), ("deepseek_v2", 2)])
def test_stages_on_two_nodes_say_what_one_gpu_says(name: str, n_each: int, tmp_path: pathlib.Path) -> None:
    """Kernel by kernel, then captured; at last a rank of the other node is lost."""
    if torch.cuda.device_count() < 2 * n_each:
        pytest.skip(f"needs {2 * n_each} GPUs")
    end_s = time.monotonic() + LIMIT_S
    model = checkpoint(name, tmp_path / name)
    gpu: dict[str, Any] = {**SIZE, "device": "cuda"}
    one = LLM(model, **gpu)
    expected = json.loads(json.dumps(answers(one)))
    one.shutdown()
    mesh = {"pipeline_parallel_size": 2, "tensor_parallel_size": n_each}
    for end in ("leave", "lose"):
        options = {**gpu, **mesh, "enforce_eager": end == "leave"}
        nodes = TwoNodes(model, tmp_path, n_each, end_s - time.monotonic(), end, **options)
        try:
            found, *loss = nodes.said()
            assert found == expected, f"eager: {options['enforce_eager']}"
            if end == "leave":
                assert nodes.status() == 0
                continue
            ((pid, why),) = loss
            # How it ended is known once the system has freed its GPU, which may take too long.
            how = rf"rank {2 * n_each - 1} \(process {pid} on node 1\) ended with (SIGKILL|an unknown end)"
            assert re.search(how, why), why
        finally:
            nodes.kill()
