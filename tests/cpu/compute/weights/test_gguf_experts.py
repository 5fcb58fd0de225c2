"""Experts of GGUF files: blocks of MXFP4 as GPUs keep them, bit for bit those of the checkpoint; refusals by name."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from family_cases import checkpoint_of
from gguf_experts import as_on_gpus, checkpoints, ffns, numbers_of, schemes, write_gpt_oss
from gguf_families import write_family
from test_rank_weights import RankOf, numbers

from quire.bench.shape import FOLDER
from quire.compute.dist.comm import SoloComm
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.choice import choose
from quire.compute.schemes.packed import Blocks
from quire.compute.weights.footprint import Weights
from quire.compute.weights.header import Entry
from quire.compute.weights.loader import load_model
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import placed
from quire.config.model import read_arch
from quire.config.parameters import Kept, matrices
from quire.core.errors import LoadError
from quire.kernels.moe import CodedMatrices

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return checkpoints(tmp_path_factory.mktemp("gpt-oss"))


def load(path: pathlib.Path, arch: ModelArch | None = None, comm: SoloComm | None = None) -> Decoder:
    return load_model(
        path, arch or read_arch(path), dtype=torch.float32, device=CPU, max_model_len=64, quantization="auto",
        progress=False, comm=comm,
    )  # fmt: skip


def test_experts_are_the_numbers_of_the_package(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = write_gpt_oss(folder / "coded", tmp_path / "m.gguf")
    for number, ffn in enumerate(ffns(load(path))):
        parts = [numbers_of(path, f"blk.{number}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
        for expert, (up, down) in enumerate(zip(ffn.up.linears, ffn.down.linears, strict=True)):
            for linear, expected in ((up, torch.cat([parts[0][expert], parts[1][expert]])), (down, parts[2][expert])):
                bank = ffn.up if linear is up else ffn.down
                own = linear.product.packed.dequantized() if bank.matrices is None else bank.matrices[expert]
                assert torch.equal(own, expected), (number, expert)


def test_routers_are_kept_in_no_blocks() -> None:
    """They are never rounded, nor are their activations."""
    arch = read_arch(FOLDER / "qwen3-30b-a3b", {"num_hidden_layers": 1})
    entries = {
        f"{name}.weight": Entry(f"{name}.weight", "Q8_0", (n_rows, one.n_in), 0, n_rows * one.n_in // 32 * 34)
        for one in matrices(arch) for name, n_rows in one.parts
    }  # fmt: skip
    schemes = choose("auto", CPU, torch.bfloat16, arch, entries)
    routers = [one for one in matrices(arch) if one.kept is not Kept.BY_SCHEME]
    assert routers and not any(isinstance(schemes.of(one), Blocks) for one in routers)
    assert isinstance(schemes.of(next(matrices(arch))), Blocks)


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("apart", [False, True])
def test_a_gpu_keeps_experts_as_the_checkpoint_has_them(
    folder: pathlib.Path, rank: int | None, apart: bool, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each code and each exponent, of all ranks, which divide every expert or have some of them each."""
    as_on_gpus(monkeypatch)
    path, models = write_gpt_oss(folder / "coded", tmp_path / "m.gguf"), []
    for source in (path, folder / "coded"):
        arch, comm = read_arch(source), None
        if rank is not None:
            config = EngineConfig(enable_expert_parallel=apart, tensor_parallel_size=2)
            arch, comm = placed(arch, config), RankOf(rank, 2)
        models.append(load(source, arch, comm))
        sizes = Weights(source, arch, CPU, comm=comm).footprint(torch.float32, "auto")
        assert sizes.held_bytes == models[-1].n_bytes <= sizes.peak_bytes <= sizes.address_bytes
    for ours, theirs in zip(*map(ffns, models), strict=True):
        for own, other in ((ours.up, theirs.up), (ours.down, theirs.down)):
            assert isinstance(own.matrices, CodedMatrices) and isinstance(other.matrices, CodedMatrices)
            assert torch.equal(own.matrices.codes, other.matrices.codes)
            assert torch.equal(own.matrices.scales, other.matrices.scales)
            assert own.matrices.codes.any() and own.matrices.group == 32
    assert schemes(models[0]) == {"mxfp4"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("case", "architecture", "rotated"),
    [("phi3", "phi3", 16), ("glm4", "glm4", 16), ("mixtral", "llama", 16), ("qwen3_moe", "qwen3moe", 32)],
)
def test_ranks_have_their_part_of_fused_and_stacked_matrices(
    case: str, architecture: str, rotated: int, rank: int, tmp_path: pathlib.Path
) -> None:
    """As of the checkpoint's own tensors."""
    oracle = checkpoint_of(case, tmp_path / "hf")
    path = write_family(tmp_path / "m.gguf", oracle, architecture, rope__dimension_count=rotated)
    ours, theirs = (numbers(load(one, comm=RankOf(rank, 2))) for one in (path, tmp_path / "hf"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"expert_count": None}, "gpt-oss.expert_count is missing"),
        ({"expert_feed_forward_length": None}, "gpt-oss.expert_feed_forward_length is missing"),
        ({"attention__sliding_window": None}, "gpt-oss.attention.sliding_window is missing"),
        ({"expert_count": 5}, "config.json implies 5 experts in its first"),
        ({"expert_count": 0}, "it comes from the key gpt-oss.expert_count"),
        ({"expert_used_count": 5}, "it comes from the key gpt-oss.expert_used_count"),
        ({"expert_feed_forward_length": 32}, "experts.gate_proj.bias[0] has shape (64,); config.json implies (32,)"),
        ({"attention__sliding_window_pattern": 3}, "gpt-oss.attention.sliding_window_pattern = 3 is not supported"),
        ({"expert_shared_count": 1}, "gpt-oss.expert_shared_count = 1 is not supported; only 0 is"),
        ({"expert_weights_scale": 2.5}, "gpt-oss.expert_weights_scale = 2.5 is not supported"),
        ({"rope__freq_base_swa": 1e4}, "gpt-oss.rope.freq_base_swa = 10000.0 is not supported"),
        ({"blk__1__attn_sinks__weight": None}, "the checkpoint has no tensor 'model.layers.1.self_attn.sinks'"),
        ({"blk__2__ffn_up_exps__bias": None}, "model.layers.2.mlp.experts.0.up_proj.bias"),
        ({"blk__0__ffn_gate_inp__weight": None}, "the checkpoint has no tensor 'model.layers.0.mlp.gate.weight'"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(
    folder: pathlib.Path, changes: dict[str, Any], said: str, tmp_path: pathlib.Path
) -> None:
    path = write_gpt_oss(folder / "coded", tmp_path / "m.gguf", **changes)
    with pytest.raises(LoadError) as caught:
        load(path)
    assert said in caught.value.message, caught.value.message
