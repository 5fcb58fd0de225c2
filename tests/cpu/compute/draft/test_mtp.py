"""Guesses of MTP modules against an oracle of transformers' modules, in each layout; and what is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import mtp_case
import numpy as np
import pytest
import torch
from head_case import Guess, all_right, drafting, watched, work
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.compute.draft import with_head
from quire.compute.draft.head import Head
from quire.compute.forward.fused import FusedForward
from quire.compute.runner.features import Features
from quire.core.errors import ConfigError, LoadError
from quire.kernels.fused_step import FusedStep

pytestmark = pytest.mark.usefixtures("timed_briefly")

Plant = Callable[[pytest.MonkeyPatch], None]
MTP: dict[str, Any] = {"speculative_config": {"method": "mtp"}}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[pathlib.Path, mtp_case.Oracle]]:
    folders = {case: tmp_path_factory.mktemp(case) for case in mtp_case.CASES}
    return {case: (folder, mtp_case.write(folder, case)) for case, folder in folders.items()}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    return watched(monkeypatch)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("deepseek", {}),
        ("mimo", {"max_num_batched_tokens": 16, "max_num_seqs": 4}),
        ("deepseek", {"num_gpu_blocks_override": 15, "max_num_seqs": 6}),
    ],
    ids=["whole prompts", "prompts in parts", "few pages"],
)
def test_guesses_are_the_oracles(
    oracles: dict[str, tuple[pathlib.Path, mtp_case.Oracle]], seen: list[Guess], case: str, options: dict[str, Any]
) -> None:
    folder, oracle = oracles[case]
    plain = drafting(folder, **options)
    said = work(plain)
    plain.shutdown()
    llm = drafting(folder, **MTP | options)
    seen.clear()  # what was timed at the start
    assert work(llm) == said
    stats = llm.stats()
    llm.shutdown()
    assert len(seen) > 60 and stats.prefix_hits > 0
    assert (stats.preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert all_right(oracle, seen, 80)


def short(folder: pathlib.Path, seen: list[Guess], **options: Any) -> None:
    """A prompt and few tokens."""
    llm = drafting(folder, **MTP | options)
    seen.clear()  # what was timed at the start
    prompts = [{"prompt_token_ids": [(n * i + 3) % 250 for i in range(20 + n)]} for n in range(1, 9)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    llm.shutdown()


def head_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_head, "obstacle", lambda head: "told so")


def model_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedForward, "run", lambda self, step: None)
    monkeypatch.setattr(FusedForward, "ready", lambda self, step, start_s: None)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((case, model_by_operations) for case in mtp_case.CASES),
        *((case, head_by_operations) for case in ("deepseek", "mimo")),  # the others are so anyway
    ],
)
def test_operation_by_operation(
    oracles: dict[str, tuple[pathlib.Path, mtp_case.Oracle]],
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    way: Plant,
) -> None:
    folder, oracle = oracles[case]
    way(monkeypatch)
    short(folder, seen)
    assert len(seen) > 16 and all_right(oracle, seen, 80)


def states_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda head: setattr(head, "model_norm", None))


def chains_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    head_by_operations(monkeypatch)
    monkeypatch.setattr(Head, "chained", lambda self, states: states)


def chains_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first guess leaves is not what the second reads."""
    monkeypatch.setattr(FusedStep, "norm", lambda self, x, norm, out: None)


def sides_in_the_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of the embedding and of the feature change places."""

    def swap(head: Head) -> None:
        head.embedded, head.feature = head.feature, head.embedded

    changed(monkeypatch, swap)


def states_before_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Features.__init__
    monkeypatch.setattr(Features, "__init__", lambda self, taps, *rest: real(self, (taps[0] - 1,), *rest))


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Head], None]) -> None:
    real = Head.reach

    def reach(self: Head, max_model_len: int) -> None:
        change(self)
        real(self, max_model_len)

    monkeypatch.setattr(Head, "reach", reach)


@pytest.mark.parametrize(
    "plant",
    [
        states_before_the_norm, chains_before_the_norm, chains_of_other_rows, sides_in_the_other_order,
        states_before_the_last_layer,
    ],
)  # fmt: skip
def test_planted_bugs_are_caught(
    oracles: dict[str, tuple[pathlib.Path, mtp_case.Oracle]],
    seen: list[Guess],
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
) -> None:
    folder, oracle = oracles["deepseek"]
    plant(monkeypatch)
    short(folder, seen)
    assert not all_right(oracle, seen, 80)


def test_a_folder_of_its_own(
    oracles: dict[str, tuple[pathlib.Path, mtp_case.Oracle]], seen: list[Guess], tmp_path: pathlib.Path
) -> None:
    """It needs nothing of the model: neither table nor output matrix, which are not read where they are there."""
    folder, oracle = oracles["deepseek"]
    prefix = mtp_case.CASES["deepseek"]["prefix"]
    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if name.startswith(prefix)}
    tensors |= {f"{prefix}{name}.weight": torch.zeros(256, 64) for name in ("embed_tokens", "shared_head.head")}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    short(folder, seen, speculative_config={"method": "mtp", "model": str(tmp_path)})
    assert len(seen) > 16 and all_right(oracle, seen, 80)


def test_it_is_no_part_of_the_model(oracles: dict[str, tuple[pathlib.Path, mtp_case.Oracle]]) -> None:
    """Its states of a prompt are transformers', and its memory is counted where it is used."""
    folder, oracle = oracles["mimo"]
    llm = drafting(folder, **MTP | {"max_num_seqs": 1})
    tokens = [3 * i % 250 for i in range(40)]
    llm.generate([{"prompt_token_ids": tokens}], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    worker: Any = llm.engine.executor.worker
    runner, n_with = worker.runner, worker.load().weights_bytes
    locs = runner.tables.cache_locs(np.zeros(40, np.int64), np.arange(40))[0]
    found = torch.zeros(40, 64)
    runner.pool.features.read(torch.from_numpy(locs), found)
    llm.shutdown()
    assert torch.allclose(found, oracle.features(tokens), atol=1e-4)
    plain = drafting(folder)
    own: Any = plain.engine.executor.worker
    module = {name: one for name, one in load_file(folder / "model.safetensors").items() if "mtp_layers" in name}
    assert n_with - own.load().weights_bytes >= 4 * sum(one.numel() for one in module.values())
    plain.shutdown()


@pytest.mark.parametrize(
    ("case", "lacking", "config", "said"),
    [
        ("deepseek", "eh_proj.weight", {}, "lacks 'model.layers.3.eh_proj.weight': give one in the layout that"),
        ("mimo", "self_attn.q_proj.bias", {}, "lacks 'model.mtp_layers.0.self_attn.q_proj.bias'"),
        ("mimo", "", {"num_nextn_predict_layers": 0}, "has no MTP module, as its config.json has no num_nextn_pred"),
        ("deepseek", "", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_a_checkpoint_without_it(
    tmp_path: pathlib.Path, case: str, lacking: str, config: dict[str, Any], said: str
) -> None:
    mtp_case.write(tmp_path, case)
    mtp_case.add(tmp_path, {}, **config)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if lacking:
        del tensors[mtp_case.CASES[case]["prefix"] + lacking]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((ConfigError, LoadError)) as refused:
        drafting(tmp_path, **MTP)
    assert said in str(refused.value)


def test_tensors_of_a_module_that_the_config_does_not_have_are_left_over(tmp_path: pathlib.Path) -> None:
    mtp_case.write(tmp_path, "deepseek")
    mtp_case.add(tmp_path, {}, num_nextn_predict_layers=0)
    with pytest.raises(LoadError, match=r"does not use: 'model.layers.3.eh_proj.weight'"):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu")
