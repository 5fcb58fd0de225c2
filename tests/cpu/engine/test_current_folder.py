"""Files of the current folder are not taken for modules by the processes that this one starts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from quire.core.interpreter import python

ENGINE = """
import asyncio
from quire.bench.shape import shape_options
from quire.config.engine import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine.async_llm import AsyncLLM
async def main():
    llm = await AsyncLLM.create(EngineConfig(**shape_options("qwen3-0.6b"), device="null"))
    async for output in llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)):
        pass
    await llm.shutdown()
    print(len(output.outputs[0].token_ids))
asyncio.run(main())
"""


def test_an_engine_does_not_import_files_of_the_current_folder(tmp_path: pathlib.Path) -> None:
    """As when `quire` is started as a script."""
    for name in ("queue", "select", "nt", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ENGINE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize("paths, looks", [(["/elsewhere"], False), ([""], True), ([os.curdir], False), (None, True)])
def test_who_looks_there_lets_its_processes_look_there(
    paths: list[str] | None, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` does, and then the package itself may be there. None: the folder by its name."""
    monkeypatch.setattr(sys, "path", [os.getcwd()] if paths is None else paths)
    assert python("-m", "one") == [sys.executable, *([] if looks else ["-P"]), "-m", "one"]


def test_a_folder_that_is_gone_is_not_looked_into(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "gone")])
    (tmp_path / "gone").rmdir()
    assert "-P" in python("-m", "one")
