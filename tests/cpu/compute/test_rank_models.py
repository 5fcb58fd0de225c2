"""Two processes share a model: logits and greedy tokens are those of one, and what cannot be shared is refused.

The oracle is the same checkpoint on one rank, which `test_families.py` compares with transformers.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import rank_models
import torch
from family_cases import CASES, checkpoint_of, random_checkpoint
from gguf_files import write_gguf
from rank_models import facts_of, ready, run, worker_of

from quire.compute import platform
from quire.kernels import native

TOLERANCE: Final = 1e-4
QWEN3: Final = {"head_dim": 32, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
GROUPS: Final = {**QWEN3, "hidden_size": 128, "head_dim": 64}
LLAMA: Final = {
    "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 255,
}  # fmt: skip
TILES: Final = {"head_dim": 32, "num_key_value_heads": 2}
FAMILIES: Final = (
    *("gpt_neox", "falcon", "falcon-new", "falcon-alibi-parallel", "gemma2", "gpt2", "opt", "phi3", "stablelm-qk_norm"),
    *("cohere-qk-norm", "glm4", "granite-bias", "seed_oss-biases", "smollm3", "minicpm"),
    *("qwen2_moe", "gpt_oss", "glm4_moe-groups", "deepseek_v2"),
    *("olmo2", "lfm2-bias", "bamba-bias", "mamba2-bias", "qwen3_next"),
)
"""Whole q, k, v in a file, in groups or not; transposed; one KV head for both; slopes of heads; tied or not; norms of
heads, of each head in a tensor of its own; biases of row-parallel matrices; interleaved rotations; multipliers;
experts, one by one and in one tensor, with biases, beside a shared one; lines that all ranks have. A norm of all heads
as one; recurrent layers whose rows are of several kinds, in a file in groups or not, with groups whole or on both."""
MADE: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "qwen3": ("Qwen3", QWEN3, {}),
    "qwen3-tied": ("Qwen3", {**QWEN3, "tie_word_embeddings": True}, {}),
    "uneven-vocabulary": ("Qwen3", {**QWEN3, "vocab_size": 255}, {}),
    "one-KV-head": ("Qwen3", {**QWEN3, "num_key_value_heads": 1}, {}),
    "dummy": ("Qwen3", QWEN3, {"load_format": "dummy", "seed": 3}),
    "dummy-biases": ("GPTNeoX", {}, {"load_format": "dummy"}),
    "int4": ("Qwen3", GROUPS, {"quantization": "int4"}),
    "int8-g32": ("Qwen3", {**GROUPS, "tie_word_embeddings": True}, {"quantization": "int8-g32"}),
    "int8": ("Qwen3", GROUPS, {"quantization": "int8"}),
    "bfloat16": ("Qwen3", QWEN3, {"dtype": "bfloat16"}),
}
"""Name → family, fields of its config.json, options."""
COARSE: Final = ("int8", "bfloat16")
EXACT: Final = (
    *(name for name, case in MADE.items() if name not in COARSE and "quantization" not in case[2]),
    *("gguf-F32", "gguf-Q6_K"),
)
ROUNDED: Final = ("int4", "int8-g32", "gguf-Q8_0", "gguf-Q4_0", "gguf-one-KV-head")
REFUSED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any], str]]] = {
    "KV-heads": (
        "Qwen3",
        {**QWEN3, "num_attention_heads": 6, "num_key_value_heads": 3},
        {},
        "attention has 3 KV heads",
    ),
    "heads": (
        "Qwen3",
        {**QWEN3, "num_attention_heads": 3, "num_key_value_heads": 1},
        {},
        "attention has 3 query heads",
    ),
    "feed-forward": ("Qwen3", {**QWEN3, "intermediate_size": 97}, {}, "a feed-forward is 97 wide"),
    "groups": ("Qwen3", {**GROUPS, "intermediate_size": 192}, {"quantization": "int4"}, "are not a multiple of the 64"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (checkpoint, options)."""
    folder = tmp_path_factory.mktemp("models")
    found: dict[str, tuple[str, dict[str, Any]]] = {}

    def place(name: str) -> pathlib.Path:
        (folder / name).mkdir()
        return folder / name

    for name in FAMILIES:
        assert name in CASES
        checkpoint_of(name, place(name))
        found[name] = str(folder / name), {}
    for name, (family, fields, options) in MADE.items():
        random_checkpoint(place(name), family, **fields)
        found[name] = str(folder / name), options
    for name, (family, fields, options, _) in REFUSED.items():
        random_checkpoint(place(name), family, **fields)
        found[name] = str(folder / name), options
    model = random_checkpoint(place("llama"), "Llama", **LLAMA)
    for dtype in ("F32", "Q8_0", "Q4_0", "Q6_K"):
        found[f"gguf-{dtype}"] = str(write_gguf(folder / f"{dtype}.gguf", model, "llama", dtype)), {}
    for name, fields in (("gguf-one-KV-head", {"num_key_value_heads": 1}), ("tiles", TILES)):
        model = random_checkpoint(place(name), "Llama", **{**LLAMA, **fields})
        found[name] = str(write_gguf(folder / f"{name}.gguf", model, "llama", "Q8_0")), {}
    return found


@pytest.fixture(scope="module")
def two(
    cases: dict[str, tuple[str, dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Name → what each of two ranks made of it. One pair of processes does all."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases").write_text("\n".join(json.dumps([name, *case]) for name, case in cases.items()))
    ranks = [
        subprocess.Popen(
            [sys.executable, rank_models.__file__, str(rank), "2", f"{folder}/meet", str(folder / "cases")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return {name: [torch.load(folder / f"{name}.{rank}") for rank in range(2)] for name in cases}


def one_rank(case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a rank alone makes of it: tokens in one native call where there is one, logits kernel by kernel."""
    path, options = case
    worker = ready(worker_of(pathlib.Path(path), **options))
    tokens, _ = run(worker)
    monkeypatch.setattr(platform, "obstacle", lambda model: "a reason")
    eager = ready(worker_of(pathlib.Path(path), **options))
    again, logits = run(eager)
    assert again == tokens
    return {"tokens": tokens, "logits": logits, **facts_of(worker, options.get("quantization", "auto"))}


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert [one.shape for one in found] == [one.shape for one in expected]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*FAMILIES, *EXACT, *ROUNDED])
def test_two_ranks_are_one(
    name: str,
    cases: dict[str, tuple[str, dict[str, Any]]],
    two: dict[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where activations are rounded, the last bit of a sum decides now and then which of two integers one becomes: the
    prompts' logits are equal, later ones within what rounding costs."""
    expected, (first, second) = one_rank(cases[name], monkeypatch), two[name]
    assert first["tokens"] == second["tokens"] == expected["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(first["logits"], second["logits"], strict=True)), "the same bits"
    n_equal = 1 if name in ROUNDED else len(expected["logits"])
    assert difference(first["logits"][:n_equal], expected["logits"][:n_equal]) <= TOLERANCE
    if name in ROUNDED:
        exact = one_rank((cases[name][0], {"quantization": "none"}), monkeypatch)["logits"]
        assert difference(first["logits"], expected["logits"]) < difference(expected["logits"][:1], exact[:1])
    assert max(float(one.abs().max()) for one in expected["logits"]) > 100 * TOLERANCE
    for rank in (first, second):
        assert rank["held"] == rank["footprint"] < expected["held"]
    n_kv_heads = worker_of(pathlib.Path(cases[name][0])).arch.n_kv_heads
    assert first["kv"] == expected["kv"] // (1 if n_kv_heads == 1 else 2)


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
@pytest.mark.parametrize("name", COARSE)
def test_ranks_round_no_more_than_one(
    name: str,
    cases: dict[str, tuple[str, dict[str, Any]]],
    two: dict[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """int8 has one scale a row, of weights and of activations: a rank's are those of its own columns. In bfloat16 each
    term of a sum is rounded. So logits are others, and as near to exact ones."""
    path, options = cases[name]
    exact = one_rank((path, {}), monkeypatch)["logits"][0]
    one, (first, second) = one_rank((path, options), monkeypatch), two[name]
    assert first["tokens"] == second["tokens"]
    assert all(torch.equal(a, b) for a, b in zip(first["logits"], second["logits"], strict=True))
    of_one, of_two = (float((found["logits"][0] - exact).square().mean().sqrt()) for found in (one, first))
    assert 0 < of_two < 1.25 * of_one


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_ranks_cannot_share(name: str, two: dict[str, list[dict[str, Any]]]) -> None:
    for rank in two[name]:
        assert REFUSED[name][3] in rank["refused"]


def test_blocks_are_not_cut_through_tiles(two: dict[str, list[dict[str, Any]]]) -> None:
    for rank in two["tiles"]:
        assert "self_attn.k_proj has 64 outputs" in rank["refused"], rank
