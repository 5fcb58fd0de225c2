"""The typed keyword arguments are those of `EngineConfig`, and a user's file passes type checkers."""

from __future__ import annotations

import ast
import inspect
import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.vllm_document import DOCUMENT, document
from quire.cli.keywords_module import TARGET, keywords_module
from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN, State
from quire.config.keywords import EngineOptions
from quire.core import sampling
from quire.core.sampling import SamplingParams
from quire.engine.llm import LLM

ROOT = pathlib.Path(__file__).parents[3]
NAMES = json.loads((ROOT / "benchmarks" / "vllm_names.json").read_text())
GOOD = """
from quire import LLM, AsyncEngineArgs, EngineArgs, SamplingParams, StructuredOutputsParams
from quire import PromptType, TextPrompt, TokensPrompt

llm = LLM("model", dtype="half", quantization=None, tensor_parallel_size=1, trust_remote_code=True, max_model_len="32k",
          served_model_name="a", hf_overrides={"rope_theta": 1e6}, kv_cache_memory_bytes=1 << 30)
LLM.from_engine_args(EngineArgs(model="model", seed=None))
AsyncEngineArgs("model", enable_prefix_caching=False)
params = SamplingParams(stop="x", bad_words="y", logit_bias={"5": 1.0}, max_tokens=None)
SamplingParams(stop=["x"], stop_token_ids=(1, 2), logit_bias={5: 1}, temperature=0,
               structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
text: str = llm.generate("a", params)[0].outputs[0].text
mixed: list[PromptType] = ["a", [1, 2], TextPrompt(prompt="a"), TokensPrompt(prompt_token_ids=[1])]
llm.generate(mixed, [params] * 4, priority=[1] * 4)
llm.generate([[1, 2], [3]], use_tqdm=False)
llm.generate({"prompt": "a"}, params)
llm.generate(["a", TokensPrompt(prompt_token_ids=[1]), TextPrompt(prompt="x"), {"prompt": "y"}, [1, 2]])
llm.generate([{"prompt": "y"}, {"prompt_token_ids": [1]}])
unnamed = ["a", TokensPrompt(prompt_token_ids=[1])]
llm.embed(unnamed)
plain = [{"prompt": "y"}]
llm.generate(plain)
llm.chat([{"role": "user", "content": "hi"}], params, chat_template_kwargs={"enable_thinking": False})
llm.chat([[{"role": "user", "content": "hi"}]], add_generation_prompt=False, continue_final_message=True)
vector: list[float] = llm.embed(["a"])[0].outputs.embedding
score: float = llm.score("a", ["b"])[0].outputs.score
for stop in params.stop:
    stop.strip()
for part in llm.stream("a", params):
    print(part.outputs[0].text)
"""
CONFIG = """
[mypy]
strict = True
follow_imports = silent
ignore_missing_imports = True
[mypy-torch.*,numpy.*,transformers.*,triton.*]
follow_imports = skip
follow_imports_for_stubs = True
"""
BAD = """
from quire import LLM, SamplingParams

LLM(max_num_seq=3)
LLM(dtype="flaot16")
LLM().collective_rpc("x")
SamplingParams(stop=3)
LLM().generate([None])
SamplingParams(tempereature=1.0)
"""


def test_the_keywords_are_up_to_date() -> None:
    assert TARGET.read_text() == keywords_module(), "run: python -m quire.cli.keywords_module"


def test_the_page_about_vllm_is_up_to_date() -> None:
    """And no name of vLLM's is unknown, which is a KeyError."""
    assert DOCUMENT.read_text() == document(), "run: python benchmarks/vllm_document.py"


def test_vllms_arguments_that_are_taken_are_typed() -> None:
    taken = {name for name in NAMES["llm"]["__init__"] if name not in FOREIGN or FOREIGN[name].state is State.SAME}
    assert taken - {"model"} <= set(EngineOptions.__annotations__)


def test_help_names_the_options() -> None:
    shown = inspect.signature(LLM).parameters
    assert list(shown)[:2] == ["model", "tokenizer"] and set(EngineConfig.__struct_fields__) < set(shown)
    assert shown["max_num_waiting"].default == EngineConfig().max_num_waiting


def test_the_typed_sampling_params_are_its_fields() -> None:
    tree = ast.parse(inspect.getsource(sampling))
    (given,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = [argument.arg for argument in given.args.kwonlyargs]
    assert names == list(SamplingParams.__struct_fields__)
    plain = SamplingParams()
    for name, default in zip(names, given.args.kw_defaults, strict=True):
        assert default is not None
        if isinstance(default, ast.Constant):
            assert (default.value or getattr(plain, name)) == getattr(plain, name), name
            SamplingParams(**{name: default.value}).verify(100)


@pytest.mark.timeout(600)
def test_a_users_file_passes_mypy(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "good.py", "bad.py"],
        cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in lines if not line.startswith("bad.py")] == []
    wrong = {int(line.split(":")[1]) for line in lines}
    assert wrong == {4, 5, 6, 7, 8, 9}, done.stdout
