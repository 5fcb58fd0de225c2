"""On a CPU without Triton, as `pip install quire` leaves it: an engine, and kernels that are measured."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # an import of it fails from here on
from quire import LLM, SamplingParams
llm = LLM("demo", device="cpu", num_gpu_blocks_override=20)
(output,) = llm.generate(["Once upon"], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
print(len(output.outputs[0].token_ids), [name for name in sys.modules if name.startswith("triton")])
llm.shutdown()
"""


def test_a_machine_without_triton_serves() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split("\n")[-2] == "3 ['triton']"


MEASURED = """
import sys
sys.modules["triton"] = None
from quire.cli.main import main
sys.exit(main(["bench", "kernels", "--device", "cpu", "--ops", "norm,moe", "--quick", "--time-limit", "1e-9"]))
"""


def test_kernels_are_measured_without_triton() -> None:
    ended = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert " allowed\n" in ended.stdout and "cases were not measured" in ended.stdout
