"""Once an engine is ready nothing is compiled: not for long prompts, odd lengths, nor for what is asked of tokens."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import quire

pytestmark = pytest.mark.gpu
SHAPES = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
SCRIPT = """
import json, sys
from triton.runtime.jit import JITFunction
from quire import LLM, SamplingParams
from quire.compute.forward.eager import EagerForward
from quire.kernels import jit

llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, **json.loads(sys.argv[2]))
compiled, compile, build = [], JITFunction._do_compile, jit._build

def compiling(kernel, *args, **options):
    compiled.append(kernel.fn.__name__)
    return compile(kernel, *args, **options)

def building(path, sources, *args):
    compiled.append(sources[0].name)
    return build(path, sources, *args)

def counting(forward, step):
    n_rows.append(len(step.batch.row_slots))
    return run(forward, step)

n_rows, run = [], EagerForward.run
JITFunction._do_compile, jit._build, EagerForward.run = compiling, building, counting
wishes = [{}, {"temperature": 0}, {"top_p": 0.9}, {"presence_penalty": 0.3, "logprobs": 1}]
for lengths in ([2001], [3001], [1303, 5, 1701], [7], [3001, 64, 333, 1500]):
    prompts = [{"prompt_token_ids": [(7 * i + n) % 5000 + 5 for i in range(n)]} for n in lengths]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **wish) for wish in wishes[: len(prompts)]]
    llm.generate(prompts, params, use_tqdm=False)
llm.shutdown()
print(json.dumps([compiled, n_rows]))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("qwen3-0.6b", {}),
        ("qwen3-0.6b", {"enforce_eager": True}),
        ("qwen3-0.6b", {"quantization": "fp8"}),
        ("deepseek-v2-lite", {"hf_overrides": {"num_hidden_layers": 3}}),
    ],
    ids=str,
)
def test_an_engine_that_is_ready_has_its_kernels(shape: str, options: dict[str, object]) -> None:
    """In a process of its own, as other tests leave kernels behind."""
    command = [sys.executable, "-c", SCRIPT, str(SHAPES / shape), json.dumps({"device": "cuda", **options})]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SHAPES.parents[2]), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled, n_rows = json.loads(done.stdout.splitlines()[-1])
    assert any(n > 2048 and n % 2 for n in n_rows), "steps with an odd number of rows ran kernel by kernel"
    assert compiled == []
