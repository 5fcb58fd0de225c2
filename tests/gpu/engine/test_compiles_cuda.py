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
    compiled.append([kernel.fn.__name__, *n_rows[-1:]])
    return compile(kernel, *args, **options)

def building(path, sources, *args):
    compiled.append([sources[0].name, *n_rows[-1:]])
    return build(path, sources, *args)

def counting(forward, step):
    n_rows.append(len(step.batch.row_slots))
    return run(forward, step)

n_rows, run = [], EagerForward.run
JITFunction._do_compile, jit._build, EagerForward.run = compiling, building, counting
wishes = [{}, {"temperature": 0}, {"top_p": 0.9}, {"presence_penalty": 0.3, "logprobs": 1}, {"top_k": 5, "min_p": 0.1}]
wishes += [{"logit_bias": {9: 1.0}, "seed": 3}, {"repetition_penalty": 1.1}, {"prompt_logprobs": 2}, {"n": 2}]
lengths = [2001], [3001], [1303, 5, 1701], [7], [3001, 64, 333, 1500], [3002], [3004], [3000], [2017, 2018, 2020, 7]
for number, each in enumerate([*lengths, *([3003] for _ in wishes), *([3] for _ in wishes)]):
    prompts = [{"prompt_token_ids": [(7 * i + n + number) % 5000 + 5 for i in range(n)]} for n in each]
    params = [SamplingParams(max_tokens=4, ignore_eos=True, **wishes[(number + i) % 9]) for i in range(len(each))]
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
    given = json.dumps({"device": "cuda", "kv_cache_memory_bytes": 1 << 30, **options})
    command = [sys.executable, "-c", SCRIPT, str(SHAPES / shape), given]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SHAPES.parents[2]), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled, n_rows = json.loads(done.stdout.splitlines()[-1])
    assert any(n > 2048 and n % 2 for n in n_rows), "steps with an odd number of rows ran kernel by kernel"
    assert not compiled, f"compiled while requests waited, after steps of so many rows: {compiled}"
