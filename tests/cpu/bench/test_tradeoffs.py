"""`quire bench tradeoffs`: bits of a text against the model's own loss; the table; the picture."""

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
from quire.bench.tradeoff_chart import write_tradeoff_chart
from quire.bench.tradeoffs import MADE, WHILE_LOADING, lines, measure, read_texts
from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError

TEXT = "def add(a, b):\n    return a + b\n" * 3


def test_rows_of_all_variants(tmp_path: pathlib.Path) -> None:
    oracle = random_checkpoint(tmp_path / "model", "Llama", vocab_size=byte_model.N_LOGITS)
    byte_model.make_tokenizer(tmp_path / "model")
    model = str(tmp_path / "model")
    config = EngineConfig(model=model, device="cpu", num_gpu_blocks_override=64, max_model_len=64, dtype="float32")
    options = TradeoffOptions(window=40, batch_sizes=[2], output_len=3, num_iters=1)
    made: list[tuple[str, str]] = []

    def make(scheme: str, method: str) -> str:
        made.append((scheme, method))
        return model if scheme == "int8" else str(tmp_path / "none")

    skipped: dict[str, str] = {}
    rows = list(measure(config, options, {"code": TEXT}, make, skipped))
    assert made == list(MADE) and len(rows) + len(skipped) == len(WHILE_LOADING) + len(MADE)
    assert all("none" in reason for reason in skipped.values()) and "fp8 by rtn" in skipped
    ids = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json").encode(TEXT).ids
    bits = 0.0
    for first in range(0, len(ids) - 1, options.window - 1):
        piece = torch.tensor(ids[first : first + options.window])
        with torch.no_grad():
            bits += float(F.cross_entropy(oracle(piece[None]).logits[0, :-1], piece[1:], reduction="sum"))
    assert rows[0].bits_per_byte["code"] == pytest.approx(bits / math.log(2) / len(TEXT), rel=1e-5)
    table = lines(rows)
    assert table[1].startswith("as it is") and "+0.00%" in table[1] and len(table) == 1 + len(rows)
    write_tradeoff_chart(str(tmp_path / "plot.html"), rows, "all")
    assert (tmp_path / "plot.html").read_text().count("<circle") == len(rows)


def test_texts_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_texts([str(tmp_path / "a.txt")])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_texts([str(tmp_path / "b.txt")])
    with pytest.raises(ConfigError, match="is needed"):
        read_texts([])
