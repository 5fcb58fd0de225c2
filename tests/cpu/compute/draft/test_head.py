"""The checkpoint of a head: what it lacks or has too much of is named, and one that does not fit is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import random_checkpoint
from head_case import HEAD, tensors_of, write

from quire import LLM
from quire.core.errors import ConfigError, LoadError

Tensors = dict[str, torch.Tensor]
TAPS = [1, 2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("model")
    random_checkpoint(folder, "Llama", num_hidden_layers=6)
    return folder


def load(folder: pathlib.Path, head: pathlib.Path, **options: Any) -> LLM:
    speculative = {"method": "eagle3", "model": str(head)}
    return LLM(str(folder), skip_tokenizer_init=True, speculative_config=speculative, **{"device": "cpu"} | options)


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def changed(name: str, value: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("fc.weight"), "lacks 'fc.weight': give one in the layout that docs/heads"),
        (without("d2t"), "lacks 'd2t'"),
        (without("midlayer.self_attn.q_proj.weight"), "lacks 'midlayer.self_attn.q_proj.weight'"),
        (changed("layers.1.x", torch.zeros(2)), "has, which is not read, 'layers.1.x'"),
        (changed("fc.weight", torch.zeros(64, 128)), "fc.weight has shape (64, 128); its config.json"),
        (changed("midlayer.hidden_norm.weight", torch.zeros(32)), "has shape (32,); its config.json implies (64,)"),
        (changed("norm.weight", torch.full((64,), float("nan"))), "norm.weight"),
        (changed("norm.weight", torch.zeros(64, dtype=torch.uint8)), "norm.weight has dtype U8; usable are"),
        (changed("d2t", torch.full((96,), 200)), "d2t gives the head's token 56 the id 256, and ids are from 0 to 255"),
    ],
)
def test_tensors_that_do_not_fit(
    folder: pathlib.Path, tmp_path: pathlib.Path, change: Callable[[Tensors], None], said: str
) -> None:
    tensors = tensors_of(HEAD)
    change(tensors)
    head = write(tmp_path / "head", tensors, eagle_aux_hidden_state_layer_ids=TAPS)
    with pytest.raises(LoadError) as refused:
        load(folder, head)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 32}, "reads states of 32 numbers and those of the model have 64"),
        ({"vocab_size": 128}, "guesses for 128 token ids and the model has 256"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "before layers 1, 2, 6 and the model has 6, from 0"),
    ],
)
def test_another_models_head(folder: pathlib.Path, tmp_path: pathlib.Path, changes: dict[str, Any], said: str) -> None:
    head = write(tmp_path / "head", **{"eagle_aux_hidden_state_layer_ids": TAPS} | changes)
    with pytest.raises(ConfigError) as refused:
        load(folder, head)
    assert said in str(refused.value)


def test_a_model_is_no_head(folder: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size is missing; it must be a number of tokens"):
        load(folder, folder)


def test_an_embedding_of_its_own_is_read(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With the model's table it guesses as without one; with another it does not."""
    guesses = []
    table = random_checkpoint(tmp_path / "again", "Llama", num_hidden_layers=6).get_input_embeddings().weight.detach()
    for own in (None, table, table.flip(0)):
        tensors = tensors_of(HEAD) | ({} if own is None else {"embed_tokens.weight": own.clone()})
        head = write(tmp_path / f"head{len(guesses)}", tensors, eagle_aux_hidden_state_layer_ids=TAPS)
        llm = load(folder, head, dtype="float32")
        worker: Any = llm.engine.executor.worker
        said: list[Any] = []
        real = worker.drafter.guess
        worker.drafter.guess = lambda contexts, real=real, said=said: said.append(real(contexts)) or said[-1]
        llm.engine.scheduler.live.drafts.choose = lambda seqs, *rest: [3] * len(seqs)
        llm.generate([{"prompt_token_ids": [7, 8, 9]}])
        llm.shutdown()
        guesses.append(said[:1])
    assert guesses[0] == guesses[1] != guesses[2]


def test_its_memory_is_counted(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A page holds the head's keys and values, and a feature in the model's type, also beside keys of 8 bits."""
    from quire.compute.draft.with_head import HeadCheckpoint
    from quire.config.eagle import read_head

    head = write(tmp_path / "head", eagle_aux_hidden_state_layer_ids=TAPS)
    source = HeadCheckpoint(head, read_head(head))
    assert source.numbers(2, 2) == 2 * 48 + 64
    assert source.numbers(4, 1.25) == 2 * 48 + 205  # 64 * 4 / 1.25, rounded up
    assert HeadCheckpoint(head, read_head(head), None, 2).numbers(2, 2) == 2 * 48 + 64, "both ranks have the one head"
    pair = write(tmp_path / "pair", num_key_value_heads=2)
    assert HeadCheckpoint(pair, read_head(pair), None, 2).numbers(2, 2) == 2 * 48 + 64, "each has one of two"
    llm = load(folder, head, dtype="float32", num_gpu_blocks_override=10, max_model_len=64)
    runner = llm.engine.executor.worker.runner
    features = runner.pool.features
    assert features.first.shape == (10, 1, 16, 32) and features.second.shape == (10, 1, 16, 32)
    llm.shutdown()
