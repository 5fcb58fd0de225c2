"""What ranks load is the whole model, cut: number for number, in every form, and of cut rows no byte more is read."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from coded_checkpoints import FORMATS, quantise
from family_cases import checkpoint_of, random_checkpoint
from gguf_files import write_gguf

from quire.compute.dist.comm import SoloComm
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.packed import PackedProduct
from quire.compute.weights import loader, pieces
from quire.compute.weights.footprint import Weights
from quire.compute.weights.loader import load_model
from quire.compute.weights.pieces import take
from quire.config.model import read_arch
from quire.core.errors import LoadError

CPU = torch.device("cpu")
QWEN3 = {
    "hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class RankOf(SoloComm):
    """A rank that loads; loading asks the others nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # type: ignore[misc]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def load(path: pathlib.Path, comm: SoloComm | None = None, **options: Any) -> Decoder:
    arch = read_arch(path)
    settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "max_model_len": 64, **options}
    return load_model(path, arch, comm=comm, progress=False, **settings)


def numbers(model: Decoder) -> dict[str, torch.Tensor]:
    """Name of each parameter → its numbers as products have them: of a packed matrix dequantised."""
    found = {model.embed.name + ".weight": model.embed.weight}
    for linear in model.linears():
        product = linear.product
        weight = product.packed.dequantized() if isinstance(product, PackedProduct) else product.tensors["weight"]
        sizes = [rows for _, rows in linear.matrix.parts]
        for kind, tensor in (("weight", weight), ("bias", linear.bias)):
            if tensor is not None:
                parts = tensor.split(sizes)  # type: ignore[no-untyped-call]
                found |= {f"{name}.{kind}": part for (name, _), part in zip(linear.matrix.parts, parts, strict=True)}
    for table in (table for layer in model.layers for table in layer.tables):
        found |= {f"{table.table.name}.{kind}": tensor for kind, tensor in table.part(0).items()}
    for norm in model.norms():
        for index, name in enumerate(norm.table.parts):
            found |= {f"{name}.{kind}": tensor for kind, tensor in norm.part(index).items()}
    return found


def check(path: pathlib.Path, n_ranks: int, n_missing: int = 0, **options: Any) -> None:
    """n_missing: parameters that only the first rank has, or one other."""
    whole, held = numbers(load(path, **options)), set()
    for rank in range(n_ranks):
        comm = RankOf(rank, n_ranks)
        model = load(path, comm, **options)
        regions, own = model.regions(), numbers(model)
        for name, tensor in own.items():
            expected = take(whole[name], regions[name]) if name in regions else whole[name]
            assert torch.equal(tensor, expected), name
        held |= own.keys()
        assert len(whole) - len(own) == (n_missing if rank else 0) or n_missing < 0
        load_format = options.get("load_format", "auto")
        weights = Weights(path, read_arch(path), CPU, load_format, comm)
        footprint = weights.footprint(torch.float32, options.get("quantization", "none"))
        assert footprint.held_bytes == model.n_bytes <= footprint.peak_bytes
    assert held == whole.keys()


@pytest.mark.parametrize(
    ("case", "n_missing"),
    [("gpt_neox", 6), ("gpt2", 6), ("falcon-new", 6), ("falcon", 0), ("phi3", 0), ("glm4", 0), ("cohere-qk-norm", 3),
     ("stablelm-qk_norm", -1), ("seed_oss-biases", 6), ("qwen3_next", 0), ("bamba-bias", -1), ("olmo2", 0)],
)  # fmt: skip
def test_families(case: str, n_missing: int, tmp_path: pathlib.Path) -> None:
    checkpoint_of(case, tmp_path)
    check(tmp_path, 2, n_missing)
    check(tmp_path, 2, n_missing, load_format="dummy")


@pytest.mark.parametrize("quantization", ["none", "int4", "int4-g32", "int8-g32"])
@pytest.mark.parametrize("tied", [False, True])
def test_rounded(quantization: str, tied: bool, tmp_path: pathlib.Path) -> None:
    random_checkpoint(tmp_path, "Qwen3", **QWEN3, tie_word_embeddings=tied)
    for n_ranks in (2, 4):  # 4 ranks have each KV head twice
        check(tmp_path, n_ranks, quantization=quantization)
    check(tmp_path, 2, quantization=quantization, load_format="dummy")


@pytest.mark.parametrize("name", ["packed-g128", "int8", "gptq-order", "fp8-odd-blocks"])
def test_quantised(name: str, tmp_path: pathlib.Path) -> None:
    """Integers held as they are, groups divided, columns in another order, blocks that cuts go through."""
    fields = {**QWEN3, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "head_dim": 64}
    random_checkpoint(tmp_path / "floating", "Qwen3", **fields)
    quantise(tmp_path / "floating", tmp_path / "coded", FORMATS[name], tmp_path / "plain")
    check(tmp_path / "coded", 2, quantization="auto")
    check(tmp_path / "coded", 2, quantization="auto", load_format="dummy")
    whole, plain = (numbers(load(tmp_path / one, quantization="auto")) for one in ("coded", "plain"))
    assert whole.keys() == plain.keys() and all(torch.equal(whole[one], plain[one]) for one in whole)


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1"])
def test_gguf(dtype: str, tmp_path: pathlib.Path) -> None:
    """Interleaved rows, blocks held as they are, blocks decoded."""
    fields = {**QWEN3, "hidden_size": 256, "num_key_value_heads": 4, "vocab_size": 255}
    path = write_gguf(tmp_path / "a.gguf", random_checkpoint(tmp_path, "Llama", **fields), "llama", dtype)
    check(path, 2, quantization="auto")


def test_rows_of_others_are_not_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_checkpoint(tmp_path, "Qwen3", **QWEN3)
    n_read, real = [0], pieces.read_into

    def counting(descriptor: int, buffer: memoryview, offset: int, path: pathlib.Path) -> None:
        n_read[0] += len(buffer)
        real(descriptor, buffer, offset, path)

    monkeypatch.setattr(pieces, "read_into", counting)
    monkeypatch.setattr(loader, "BUFFER_BYTES", 4096)
    whole = load(tmp_path)
    n_whole, n_read[0] = n_read[0], 0
    assert n_whole == whole.n_bytes
    model = load(tmp_path, RankOf(1, 2))
    cut = [linear for layer in model.layers for linear in (layer.mixer.out, layer.ffn.down)]
    n_columns = sum(linear.matrix.n_out * linear.matrix.n_in for linear in cut)
    assert n_read[0] == model.n_bytes + n_columns * 4, "rows of o and down are read whole"


def test_a_tied_head_is_compared_where_it_is_cut(tmp_path: pathlib.Path) -> None:
    random_checkpoint(tmp_path, "Qwen3", **QWEN3, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    load(tmp_path, RankOf(1, 2))
    tensors["lm_head.weight"][-1, 3] += 1
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    load(tmp_path, RankOf(0, 2))
    with pytest.raises(LoadError, match=r"lm_head\.weight differs"):
        load(tmp_path, RankOf(1, 2))
