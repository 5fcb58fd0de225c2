"""Every scheme against what it declares: tensors and bytes of a finished matrix, shares that add up, own schemes."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import msgspec
import pytest
import torch
import torch.nn.functional as F
from family_cases import checkpoint_of

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import decoder_on
from quire.compute.schemes.choice import Schemes, choose, floating
from quire.compute.schemes.coded import Source
from quire.compute.schemes.holding import holding
from quire.compute.schemes.packed import HELD, Blocks, Packed, PackedProduct, Rounded, Scheme
from quire.compute.schemes.plain import OneDnn, Plain, can_reorder
from quire.compute.schemes.w4a16 import GROUPS, RoundedInt4
from quire.compute.schemes.w8a8 import RoundedEightBits
from quire.config.codings import Layout
from quire.config.codings.coding import Coding
from quire.config.model import read_arch
from quire.config.parameters import HEAD, Cut, Kept, Matrix, matrices
from quire.core.errors import ConfigError, LoadError
from quire.kernels import native, qgemm
from quire.kernels.e4m3 import E4M3
from quire.kernels.qgemm import weight as packing

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES: list[Scheme] = [
    *(Plain(dtype) for dtype in FLOATS),
    *(OneDnn(dtype) for dtype in FLOATS if can_reorder("cpu", dtype)),
    *(Packed(dtype) for dtype in FLOATS),
    *(Rounded(name) for name in qgemm.SCHEMES),
    *(RoundedEightBits(dtype) for dtype in (E4M3, torch.int8)),
    *(RoundedInt4(torch.bfloat16, group) for group in GROUPS.values()),
    *HELD,
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def dtype_of(scheme: Scheme) -> torch.dtype:
    return getattr(scheme, "dtype", torch.bfloat16)


def label(scheme: Scheme) -> str:
    return f"{type(scheme).__name__}-{scheme.name}"


def finished(scheme: Scheme, weight: torch.Tensor) -> Linear:
    """A layer of one matrix."""
    n, k = weight.shape
    matrix = Matrix(n_in=k, parts=(("m", n),))
    linear = Linear(lambda *shape: torch.empty(shape, dtype=dtype_of(scheme)), matrix, scheme)
    if linear.weight is None:  # blocks: numbers as a file might have them, with one scale for all
        assert isinstance(linear.product, PackedProduct)
        padded = F.pad(weight.float(), (0, -k % 32, 0, -n % packing.TILE))
        codes = (padded * 4).round().clamp(-8, 7).to(torch.int16)
        codes = codes + 8 if linear.product.packed.table else codes
        packing.lay_out(linear.product.packed, 0, codes, torch.full((len(codes), codes.shape[1] // 32), 0.25).half())
    else:
        linear.weight.copy_(weight)
    linear.finish()
    return linear


@pytest.mark.parametrize("shape", [(64, 64), (200, 48), (65, 97), (1, 33)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=label)
def test_a_finished_matrix_is_what_was_declared(scheme: Scheme, shape: tuple[int, int]) -> None:
    linear = finished(scheme, torch.randn(shape))
    declared = {one.name: (one.shape, one.dtype) for one in scheme.stored(*shape)}
    assert {name: (tuple(one.shape), one.dtype) for name, one in linear.product.tensors.items()} == declared
    n_bytes = sum(one.numel() * one.element_size() for one in linear.product.tensors.values())
    assert scheme.n_bytes(*shape) == n_bytes == linear.n_bytes
    assert linear.weight is None


@pytest.mark.parametrize("group", GROUPS.values())
def test_four_bits_on_a_gpu_are_near(group: int) -> None:
    """By a reference of the kernels: nearer than the largest of a group at an end of the levels would be."""
    weight = torch.randn(96, 400, dtype=torch.bfloat16)
    linear = finished(RoundedInt4(torch.bfloat16, group), weight)
    found = linear(torch.eye(400, dtype=torch.bfloat16)).t().float()
    error = (found - weight.float()).square().mean()
    padded = F.pad(weight.float(), (0, -400 % group)).view(96, -1, group)
    steps = padded.abs().amax(-1, keepdim=True) / 7
    plain = ((padded / steps).round() * steps - padded).square().sum() / weight.numel()
    assert 0.004 < error < plain
    with pytest.raises(LoadError, match="an infinity or a NaN"):
        finished(RoundedInt4(torch.bfloat16, group), weight.index_fill(1, torch.tensor([399]), torch.inf))


def scheme_of_shares() -> list[Scheme]:
    return [one for one in SCHEMES if not isinstance(one, OneDnn)]


@pytest.mark.parametrize("scheme", scheme_of_shares(), ids=label)
def test_shares_make_the_product_of_the_whole(scheme: Scheme) -> None:
    """Two ranks: outputs beside one another, or terms that add up, of what a rank finishes from its share."""
    torch.manual_seed(0)
    dtype = dtype_of(scheme)
    parts = (("q", 256), ("k", 128), ("v", 128))
    column = Matrix(n_in=128, parts=parts, cut=Cut.COLUMN, unit=64)
    row = Matrix(n_in=256, parts=(("o", 96),), cut=Cut.ROW, unit=64)
    weights = {matrix.name: torch.randn(matrix.n_out, matrix.n_in).to(dtype) for matrix in (column, row)}
    x = {matrix.name: torch.randn(5, matrix.n_in).to(dtype) for matrix in (column, row)}
    outputs, terms = [], []
    for rank in range(2):
        mine = scheme.cut(column, rank, 2)
        pieces = weights["q"].split([rows for _, rows in parts])
        columns = zip(pieces, mine.rows, strict=True)
        held = torch.cat([piece[first : first + number] for piece, ((first, number),) in columns])
        outputs.append(finished(scheme, held)(x["q"]).split([rows for _, rows in mine.matrix.parts], dim=1))
        mine = scheme.cut(row, rank, 2)
        columns_held = slice(mine.first_column, mine.first_column + mine.matrix.n_in)
        terms.append(finished(scheme, weights["o"][:, columns_held].contiguous())(x["o"][:, columns_held].contiguous()))
    found = torch.cat([torch.cat(both, dim=1) for both in zip(*outputs, strict=True)], dim=1)
    assert torch.equal(found, finished(scheme, weights["q"])(x["q"])), "a row of a product is computed by itself"
    expected = finished(scheme, weights["o"])(x["o"]).float()
    total = terms[0].float() + terms[1].float()
    most = 0.06 if scheme.name == "fp8" else 0.02  # e4m3 has 3 bits behind the first
    assert float((total - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else most)


@pytest.mark.parametrize(
    ("scheme", "matrix", "reason"),
    [
        (Rounded("int4"), Matrix(n_in=192, parts=(("m", 64),), cut=Cut.ROW), "multiple of the 64"),
        (Rounded("int8-g32"), Matrix(n_in=96, parts=(("m", 64),), cut=Cut.ROW), "multiple of the 32"),
        (Blocks("int4-g32"), Matrix(n_in=64, parts=(("a", 64), ("b", 64)), cut=Cut.COLUMN), "multiple of the 64"),
        (Plain(torch.bfloat16), Matrix(n_in=97, parts=(("m", 64),), cut=Cut.ROW), "2 ranks cannot share"),
    ],
)
def test_what_a_scheme_cannot_cut_is_refused(scheme: Scheme, matrix: Matrix, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        scheme.cut(matrix, 0, 2)
    assert scheme.cut(matrix, 0, 1).matrix == matrix


def test_groups_do_not_bind_where_no_cut_goes_through_them() -> None:
    matrix = Matrix(n_in=96, parts=(("m", 64),), cut=Cut.COLUMN)
    assert Rounded("int4").cut(matrix, 1, 2).rows == (((32, 32),),)
    assert Rounded("int8").cut(Matrix(n_in=96, parts=(("m", 64),), cut=Cut.ROW), 1, 2).first_column == 48


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_matrix_may_have_its_own_scheme(tmp_path: pathlib.Path) -> None:
    """The output matrix in 8 bits while the others have 4, and one that is not rounded at all."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    down = "model.layers.0.mlp.down_proj"
    own: dict[str, Scheme] = {HEAD: Rounded("int8"), down: floating(torch.device("cpu"), torch.bfloat16)}
    schemes = Schemes(Rounded("int4"), own)
    model = decoder_on(torch.device("cpu"), read_arch(tmp_path), torch.bfloat16, 64, schemes)
    for _, tensor in model.weights():
        tensor.normal_()
    model.finish()
    names = {linear.matrix.name.rpartition(".")[2]: linear.scheme.name for linear in model.linears()}
    rounded = dict.fromkeys(("q_proj", "o_proj", "gate_proj"), "int4")
    assert names == {**rounded, "down_proj": "bfloat16", "lm_head": "int8"}
    tables = [model.embed.weight, model.norm.weight, *(one for norm in model.norms() for one in norm.tensors)]
    held = sum(one.nbytes for one in {id(one): one for one in tables if one is not None}.values())
    for linear in model.linears():
        held += sum(one.numel() * one.element_size() for one in linear.product.tensors.values())
        held += 0 if linear.bias is None else linear.bias.nbytes
    assert model.n_bytes == held


def test_the_device_chooses_for_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert floating(torch.device("cuda"), torch.bfloat16) == Plain(torch.bfloat16)
    assert floating(torch.device("cpu"), torch.float64) == Plain(torch.float64)
    if native.library() is not None:
        assert floating(torch.device("cpu"), torch.bfloat16) == Packed(torch.bfloat16)
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(floating(torch.device("cpu"), torch.float32), OneDnn) == can_reorder("cpu", torch.float32)


def test_layouts_are_those_of_the_packing() -> None:
    for name, dtype in (("int8", torch.bfloat16), ("int4", torch.float32), ("float16", torch.float16)):
        weight = torch.randn(70, 50).to(dtype)
        packed = qgemm.pack(weight, name) if name in qgemm.SCHEMES else qgemm.pack_floats(weight)
        data, scales = packing.layout(name, 70, 50)
        assert (tuple(packed.data.shape), packed.data.dtype) == data
        assert (tuple(packed.scales.shape), packed.scales.dtype) == scales


def test_fp8_leaves_routers_floating() -> None:
    schemes = choose("fp8", torch.device("cuda"), torch.bfloat16)
    matrix = Matrix(n_in=64, parts=(("m", 64),))
    assert schemes.of(matrix) == schemes.of(msgspec.structs.replace(matrix, bank="b")) == RoundedEightBits(E4M3)
    assert schemes.of(msgspec.structs.replace(matrix, kept=Kept.FLOATING)) == Plain(torch.bfloat16)


def test_experts_on_a_gpu_are_kept_alike_or_decoded(tmp_path: pathlib.Path) -> None:
    checkpoint_of("qwen3_moe", tmp_path)
    arch = read_arch(tmp_path)
    four = Source(Coding(layout=Layout.PACKED, bits=4, group=32), "BF16")
    sources = {f"{part}.weight": four for matrix in matrices(arch) for part, _ in matrix.parts}
    banks = {matrix.name: matrix.bank for matrix in matrices(arch) if matrix.bank}
    found = holding("auto", torch.device("cuda"), torch.bfloat16, arch, sources)
    assert set(banks) <= set(found)
    odd = next(iter(banks))
    for other in ({"act_order": True}, {"bits": 8}, {"group": 64}):
        changed = Source(msgspec.structs.replace(four.coding, **other), "BF16")
        of_one = {f"{part}.weight": changed for one in matrices(arch) if one.name == odd for part, _ in one.parts}
        left = holding("auto", torch.device("cuda"), torch.bfloat16, arch, sources | of_one)
        assert {name for name, bank in banks.items() if bank == banks[odd]} == set(found) - set(left)
