"""Stages on two nodes with a GPU each, here two trees of processes that reach each other by sockets alone: they say
what one GPU says, and a rank that is killed on the other node is named."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from rank_cases import SIZE, answers, checkpoint

from quire import LLM

pytestmark = pytest.mark.gpu
HEAD = "127.0.0.2"
"""The other node reaches it from 127.0.0.1."""
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""As between machines whose network is Ethernet."""
COMMAND = [sys.executable, "-c", "import sys; from quire.cli.main import main; sys.exit(main())", "serve"]
FIRST = """
import json, os, signal, sys
from rank_cases import answers
from quire import LLM, SamplingParams
from quire.core.errors import EngineError
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps(answers(llm)), flush=True)
os.kill(llm.engine.ranks.pids[-1], signal.SIGKILL)
try:
    while True:
        llm.generate(["one"] * 4, SamplingParams(max_tokens=80, ignore_eos=True), use_tqdm=False)
except EngineError as error:
    print(json.dumps(str(error)), flush=True)
llm.shutdown()
"""
"""What node 0 runs: the answers of an engine, and what it says of a lost rank."""


def said_by_two_nodes(model: str, n_each: int, log: pathlib.Path, **options: Any) -> list[Any]:
    """What `FIRST` prints. n_each: GPUs of a node."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(2 * n_each)))).split(",")
    nodes = [
        {**os.environ, **APART, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ",".join(those)}
        for those in (seen[:n_each], seen[n_each : 2 * n_each])
    ]
    port = str(options["master_port"])
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--master-port", port, "--headless"]
    with log.open("w") as file:
        node = subprocess.Popen([*COMMAND, model, *words], env=nodes[1], stdout=file, stderr=subprocess.STDOUT)
    try:
        head = subprocess.run(
            [sys.executable, "-c", FIRST, model, json.dumps(options)],
            env=nodes[0], stdout=subprocess.PIPE, text=True, timeout=200, check=True,
        )  # fmt: skip
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.fail(f"{error}\nnode 0 said {error.stdout}\nnode 1 said {log.read_text()[-3000:]}")
    finally:
        node.kill()
        node.wait()
    return [json.loads(line) for line in head.stdout.splitlines()]


@pytest.mark.parametrize("n_beside", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2"])
def test_stages_on_two_nodes_say_what_one_gpu_says(name: str, n_beside: int, tmp_path: pathlib.Path) -> None:
    """Kernel by kernel, and captured."""
    if torch.cuda.device_count() < 2 * n_beside:
        pytest.skip(f"needs {2 * n_beside} GPUs")
    model = checkpoint(name, tmp_path / name)
    gpu: dict[str, Any] = {**SIZE, "device": "cuda"}
    one = LLM(model, **gpu)
    expected = json.loads(json.dumps(answers(one)))
    one.shutdown()
    mesh = {"pipeline_parallel_size": 2, "tensor_parallel_size": n_beside, "nnodes": 2, "master_addr": HEAD}
    for eager in (True, False):
        port = 29_610 + (2 * os.getpid() + eager) % 1000
        found, loss = said_by_two_nodes(
            model, n_beside, tmp_path / "node.log", **gpu, **mesh, master_port=port, enforce_eager=eager
        )
        assert found == expected, f"eager: {eager}"
        assert "on node 1" in loss and "ended with SIGKILL" in loss
