"""Defaults that depend on the device and on who asks."""

from __future__ import annotations

import math
import pathlib

import pytest

from quire.bench.shape import FOLDER
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import DEFAULT_SEQS, DEFAULT_STALL_FACTOR, resolve
from quire.core.errors import ConfigError

ARCH = read_arch(pathlib.Path(FOLDER) / "llama-3.1-8b")


@pytest.mark.parametrize("device", ["cuda", "cpu", "null"])
def test_streams_are_paced_in_a_server_on_a_gpu(device: str) -> None:
    unset, given = EngineConfig(), EngineConfig(max_stall_factor=3.0)
    assert resolve(unset, ARCH, device).max_stall_factor == 0, "a batch wants throughput"
    assert resolve(unset, ARCH, device, is_server=True).max_stall_factor == DEFAULT_STALL_FACTOR[device]
    for is_server in (False, True):
        assert resolve(given, ARCH, device, is_server=is_server).max_stall_factor == 3.0


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_factor_that_leaves_no_time_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=f"max_stall_factor = {factor:g} leaves no time"):
        EngineConfig(max_stall_factor=factor).verify()
    EngineConfig(max_stall_factor=1.01).verify()


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_numbers_that_cannot_be_sent_are_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match=f"^max_stall_factor = {factor} is not allowed: it must be finite$"):
        EngineConfig(max_stall_factor=factor).verify()


def test_drafts_need_a_model() -> None:
    config = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 80 // 16})
    for device in ("cpu", "cuda"):
        limits = resolve(config, ARCH, device)
        assert (limits.max_drafts, limits.max_sampled) == (5, limits.max_num_seqs)
    assert resolve(EngineConfig(), ARCH, "cpu").max_drafts == 0
    with pytest.raises(ConfigError, match="needs a model and the device is null"):
        resolve(config, ARCH, "null")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trees_of_drafts_have_more_rows(device: str) -> None:
    config = EngineConfig(speculative_config={"method": "suffix", "branching": 2})
    assert resolve(config, ARCH, device).max_drafts == 24


@pytest.mark.parametrize(
    ("quantization", "device", "said"),
    [
        ("fp8", "cpu", "works on GPUs only and the device is cpu: leave --quantization out"),
        ("int8-g32", "cuda", "works on the CPU only and the device is cuda: add --device cpu, or leave"),
        ("int4", "null", "works on the CPU and GPUs only and the device is null: add --device cpu, or leave"),
        ("fp8", "null", "works on GPUs only and the device is null"),
    ],
)
def test_weights_are_rounded_to_what_a_device_multiplies(quantization: str, device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(EngineConfig(quantization=quantization), ARCH, device)  # type: ignore[arg-type]
    resolve(EngineConfig(quantization=quantization), ARCH, "cuda" if quantization in ("fp8", "int4") else "cpu")  # type: ignore[arg-type]


def test_sequences_that_nobody_asked_for_fit_the_tokens_of_a_step() -> None:
    """A budget below the usual number of sequences is no contradiction; one below an asked number is."""
    limits = resolve(EngineConfig(max_num_batched_tokens=512), ARCH, "cuda")
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 512), "half is left to prompts"
    for n_tokens, n_seqs in ((0, DEFAULT_SEQS["cuda"]), (DEFAULT_SEQS["cuda"], DEFAULT_SEQS["cuda"]), (1, 1), (3, 1)):
        assert resolve(EngineConfig(max_num_batched_tokens=n_tokens), ARCH, "cuda").max_num_seqs == n_seqs
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 512 is less than max_num_seqs = 600"):
        EngineConfig(max_num_batched_tokens=512, max_num_seqs=600).verify()
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineConfig(max_num_batched_tokens=10**20).verify()
