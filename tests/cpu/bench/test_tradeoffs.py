"""`quire bench tradeoffs`: bits of a text against the model's own loss; tasks; the table; the picture."""

from __future__ import annotations

import math
import pathlib

import byte_model
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from family_cases import random_checkpoint

from quire.bench.options import TradeoffOptions
from quire.bench.tasks import Task
from quire.bench.tradeoff_chart import write_tradeoff_chart
from quire.bench.tradeoffs import MADE, WHILE_LOADING, lines, measure, read_texts
from quire.cli.command import run
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError

TEXT = "def add(a, b):\n    return a + b\n" * 3


def test_rows_of_all_variants(tmp_path: pathlib.Path) -> None:
    oracle = random_checkpoint(tmp_path / "model", "Llama", vocab_size=byte_model.N_LOGITS)
    byte_model.make_tokenizer(tmp_path / "model")
    model = str(tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    config = EngineConfig(model=model, device="cpu", num_gpu_blocks_override=64, max_model_len=64, dtype="float32")
    n_layers = oracle.config.num_hidden_layers
    options = TradeoffOptions(
        window=40, batch_sizes=[2], output_len=3, num_iters=1, models=[model], task_output_len=4,
        exit_layers=[1, n_layers], exit_thresholds=[0.001, 1.0],
    )  # fmt: skip
    made: list[tuple[str, str]] = []

    def make(scheme: str, method: str) -> str:
        made.append((scheme, method))
        return model if scheme == "int8" else str(tmp_path / "none")

    with torch.no_grad():
        prompt = torch.tensor([tokenizer.encode("def ").ids])
        padding = list(range(tokenizer.get_vocab_size(), byte_model.N_LOGITS))
        reply = oracle.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, suppress_tokens=padding)
    right = Task("def ", tokenizer.decode(reply[0, prompt.shape[1] :].tolist()).strip(), task="first")
    tasks = [right, Task("def ", "something else", task="second")]
    skipped: dict[str, str] = {}
    rows = list(measure(config, options, {"code": TEXT}, tasks, make, skipped))
    assert made == list(MADE) and len(rows) + len(skipped) == len(WHILE_LOADING) + len(MADE) + 4 + 1
    beyond = [skipped.pop(f"exit after {n_layers} at {threshold:g}") for threshold in options.exit_thresholds]
    assert all(f"the model has {n_layers}" in reason for reason in beyond)
    assert all("none" in reason for reason in skipped.values()) and "fp8 by rtn" in skipped
    ids, bits = tokenizer.encode(TEXT).ids, 0.0
    for first in range(0, len(ids) - 1, options.window - 1):
        piece = torch.tensor(ids[first : first + options.window])
        with torch.no_grad():
            bits += float(F.cross_entropy(oracle(piece[None]).logits[0, :-1], piece[1:], reduction="sum"))
    expected = pytest.approx(bits / math.log(2) / len(TEXT), rel=1e-5)
    by_name = {row.name: row for row in rows}
    never, always = by_name["exit after 1 at 1"], by_name["exit after 1 at 0.001"]
    for row in (rows[0], never, by_name["model"]):
        assert row.bits_per_byte["code"] == expected and row.layers == n_layers
        assert row.tasks == {"first": (1, 1), "second": (0, 1)} and row.accuracy == 0.5
    assert always.bits_per_byte["code"] != expected and always.layers < n_layers
    table = lines(rows)
    assert table[1].startswith("as it is") and "+0.00%" in table[1] and " 50.0%" in table[1]
    assert len(table) == 1 + len(rows)
    write_tradeoff_chart(str(tmp_path / "plot.html"), rows, "all")
    assert (tmp_path / "plot.html").read_text().count("<circle") == 2 * len(rows)


def test_more_sequences_than_run_at_once_are_refused_before_anything_is_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    random_checkpoint(tmp_path / "model", "Llama", vocab_size=byte_model.N_LOGITS)
    byte_model.make_tokenizer(tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), device="cpu", num_gpu_blocks_override=64, max_num_seqs=4)
    options = TradeoffOptions(window=40, batch_sizes=[2, 5], output_len=3, num_iters=1)
    with pytest.raises(ConfigError, match="--batch-sizes 5 is more than the 4 sequences that run at once: take fewer"):
        next(measure(config, options, {"code": TEXT}, [], lambda *_: "", {}))
    with pytest.raises(SystemExit):
        run(["bench", "tradeoffs", "--batch-sizes", "1", "999999999"])
    assert "--batch-sizes: '999999999' is not allowed: it must be an integer between 1" in capsys.readouterr().err


def test_texts_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_texts([str(tmp_path / "a.txt")])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_texts([str(tmp_path / "b.txt")])
    with pytest.raises(ConfigError, match="is needed"):
        read_texts([])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt' is empty"):
        read_texts([str(tmp_path / "empty.txt")])


@pytest.mark.parametrize(("words", "message"), [
    (["--calibrate", "{few}"], "tokens, and at least 1,024 are needed"),
    (["--calibrate", "/no/such"], "--calibrate '/no/such' cannot be read"),
    (["--calibrate", "{text}", "--sample-tokens", "4096"], "--sample-tokens 4,096 is more than the model's context"),
    (["--calibrate", "{text}", "--window", "100000"], "--window 100,000 is more than the 2,047 that the context has"),
    (["--calibrate", "{text}", "--output-len", "5000"], "--output-len 5,000 is more than the 2,016 that the context"),
    (["shape:qwen3-0.6b", "--tokenizer", "demo", "--calibrate", "{text}"], "is a shape and has no weights to compare"),
    (["shape:qwen3-0.6b", "--calibrate", "{text}"], "need a tokenizer: name a checkpoint that has one"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    tmp_path: pathlib.Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("quire.bench.tradeoffs.measure", lambda *_: pytest.fail("it measures"))
    (tmp_path / "few.txt").write_text(TEXT)
    (tmp_path / "text.txt").write_text(TEXT * 200)
    words = [word.format(few=tmp_path / "few.txt", text=tmp_path / "text.txt") for word in words]
    assert run(["bench", "tradeoffs", *words, "--texts", str(tmp_path / "few.txt")]) == 2
    assert message in capsys.readouterr().err
