"""`quire generate` and `quire chat` on the bundled model."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.core.outputs import RequestOutput

ENGINE = ("--num-gpu-blocks-override", "600", "--num-threads", "1", "--device", "cpu")


def test_generate_streams_one_prompt_and_lists_several(capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
    assert main(["generate", "--prompt", "def add(a, b):", *greedy, *ENGINE]) == 0
    one = capsys.readouterr().out
    assert len(one) > 1
    assert main(["generate", "--prompt", "def add(a, b):", "-p", "import", *greedy, *ENGINE]) == 0
    several = capsys.readouterr().out
    assert several.startswith(f"--- prompt 1 of 2\n{one}--- prompt 2 of 2\n")


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], {"temperature": 0.0, "top_p": 1.0, "max_tokens": 256}),  # the bundled model's file: do_sample is false
        (["--temperature", "0.3"], {"temperature": 0.3}),
        (["--generation-config", "vllm"], {"temperature": 0.7, "max_tokens": 256}),
        (["--override-generation-config", '{"top_p": 0.5}', "--max-tokens", "3"],
         {"temperature": 0.0, "top_p": 0.5, "max_tokens": 3}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"]], ids=lambda words: words[0])
def test_what_the_command_line_leaves_open_comes_from_the_model(
    command: list[str], words: list[str], want: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []

    def stream(self: LLM, prompt: object, params: SamplingParams, adapter: None) -> Iterator[RequestOutput]:
        asked.append(params)
        return iter(())

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    assert main([*command, *words, *ENGINE]) == 0
    assert {name: getattr(asked[0], name) for name in want} == want


def test_parameters_that_contradict_each_other_are_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "./nowhere", "--prompt", "x", "--min-tokens", "9", "--max-tokens", "3"]) == 2
    assert "min_tokens = 9" in capsys.readouterr().err


def test_the_adapter_of_the_command_line_answers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each way to answer; with several, which one is meant nobody says."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"A": (4, 256), "B": (256, 4)}
    at = "base_model.model.model.layers"
    tensors = {
        f"{at}.{i}.self_attn.q_proj.lora_{kind}.weight": torch.randn(shape, generator=generator)
        for i in range(8) for kind, shape in shapes.items()
    }  # fmt: skip
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapted = ["--enable-lora", "--lora-modules", f"mine={tmp_path}"]
    greedy = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos", *ENGINE]
    for command in (["generate", "-p", "def"], ["generate", "-p", "def", "-p", "x"], ["chat"]):
        printed = []
        for more in ([], adapted):
            monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
            assert main([*command, *greedy, *more]) == 0
            printed.append(capsys.readouterr().out)
        assert printed[0] != printed[1]
    assert main(["generate", "-p", "def", *greedy, *adapted, f"other={tmp_path}"]) == 2
    assert "--lora-modules names 2 adapters, and this command answers as one" in capsys.readouterr().err


def test_generate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert main(["generate", "--max-tokens", "4", "--ignore-eos", *ENGINE]) == 0
    assert capsys.readouterr().out


def test_chat_answers_lines_from_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/hlp\nWhat is 2 + 3?\n/exit\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "12", *ENGINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "did you mean /help?" in "\n".join(lines) and len(lines) >= 3


def test_ctrl_c_while_text_streams_ends_with_130_and_one_line() -> None:
    words = ["generate", "--prompt", "def f(x):", "--max-tokens", "1900", "--ignore-eos", *ENGINE]
    command = [sys.executable, "-m", "quire", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().split("\n")[-2:] == ["quire: interrupted", ""] and b"Traceback" not in errors


def test_ctrl_c_while_the_model_loads_ends_with_130_and_one_line() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "quire", "generate", "--prompt", "x"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("torch" in line for line in process.stderr), "torch was never imported"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and errors.splitlines()[-1] == "quire: interrupted"


def test_ctrl_c_in_a_terminal_stops_the_answer_and_at_the_prompt_leaves() -> None:
    ours, theirs = pty.openpty()
    words = ["chat", "--temperature", "0", "--max-tokens", "1500", "--ignore-eos", *ENGINE]
    command = [sys.executable, "-m", "quire", *words]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        assert "/help lists commands" in read_until(ours, "> ")
        os.write(ours, b"Hello\n")
        read_until(ours, "\n")  # the echo
        assert select.select([ours], [], [], 60)[0], "no answer"
        process.send_signal(signal.SIGINT)
        read_until(ours, "\n> ")
        assert process.poll() is None, "Ctrl-C during an answer stops the answer only"
        for _ in range(5):  # readline can miss a signal that comes just before it starts to wait
            process.send_signal(signal.SIGINT)
            if select.select([ours], [], [], 3)[0]:
                break
        assert "quire: interrupted" in read_until(ours, "interrupted")
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(ours)


def read_until(terminal: int, end: str, limit_s: float = 60.0) -> str:
    """What the terminal shows up to `end`; an assertion if it does not come."""
    text, deadline_s = "", time.monotonic() + limit_s
    while end not in text:
        assert time.monotonic() < deadline_s and select.select([terminal], [], [], limit_s)[0], text
        text += os.read(terminal, 1024).decode(errors="replace")
    return text


def test_a_prompt_that_is_too_long_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "word " * 200, "--max-model-len", "64", *ENGINE]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("quire: error: ") and "64" in error


def test_a_model_without_tokenizer_cannot_chat(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "shape:qwen3-0.6b"]) == 2
    assert "has no tokenizer, which this command needs: name one with --tokenizer" in capsys.readouterr().err


def test_a_missing_folder_is_a_load_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "./nowhere", "--prompt", "x"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_bad_prompt_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "", *ENGINE]) == 2
    assert "prompt = '' is not allowed" in capsys.readouterr().err
