"""An EAGLE-3 head on its device: its parameters from a checkpoint, and one step of it operation by operation.

Owns which tensors a head has, and its data flow, the oracle of `head_steps.NativeSteps`. Does not own its config.json
(`config/eagle`), pages, nor when it is asked (`eagle.py`).
Row p reads the embedding of token p and the feature of token p - 1 (Li et al. 2025, arXiv 2503.01840, figure 5).
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from quire.compute.layers.attention import variant_of
from quire.compute.layers.context import Context
from quire.compute.layers.linear import Embedding, Linear, Make
from quire.compute.layers.norm import Norm
from quire.compute.layers.rotary import rope_table
from quire.compute.models.decoder import Decoder
from quire.compute.schemes.choice import floating
from quire.compute.schemes.packed import Blocks
from quire.compute.schemes.scheme import MatrixScheme
from quire.compute.weights.checkpoint import Shard, open_checkpoint, open_shard, read_into
from quire.compute.weights.pieces import TORCH_DTYPES
from quire.config.arch import ModelArch
from quire.config.eagle import N_TAPS, HeadArch
from quire.config.parameters import Matrix, NormTable
from quire.core.errors import LoadError, shown

DTYPES: Final = TORCH_DTYPES | {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
LAYER: Final = "midlayer."
EMBEDDING: Final = "embed_tokens.weight"
OFFSETS: Final = "d2t"
"""int64 [draft vocabulary]: what a small id lacks to be the model's."""
NOT_READ: Final = "t2d"
"""Which of the model's ids have a small one: follows from the offsets."""


class Head:
    """Parameters in the model's dtype, matrices as `scheme` keeps them."""

    def __init__(
        self, arch: HeadArch, make: Make, device: torch.device, dtype: torch.dtype, scheme: MatrixScheme
    ) -> None:
        self.arch, self.dtype = arch, dtype
        own, spec = arch.arch, arch.arch.layers[0]
        mixer, ffn, hidden = spec.mixer, spec.ffn, arch.arch.hidden_size

        def linear(n_in: int, *parts: tuple[str, int]) -> Linear:
            return Linear(make, Matrix(n_in=n_in, parts=parts), scheme)

        def norm(name: str) -> Norm:
            return Norm(make, NormTable(name=name, shape=(hidden,), spec=spec.norm))

        qkv = [(f"{LAYER}self_attn.{name}_proj", n) for name, n in zip("qkv", _sizes(own), strict=True)]
        self.joins = [linear(hidden, ("fc", hidden)) for _ in range(N_TAPS)]
        """The columns of `fc` for each tapped layer."""
        self.embedded_qkv, self.feature_qkv = linear(hidden, *qkv), linear(hidden, *qkv)
        """The columns of the projection for the embedding, and for the feature."""
        self.out = linear(mixer.q_size, (LAYER + "self_attn.o_proj", hidden))
        self.up = linear(hidden, (LAYER + "mlp.gate_proj", ffn.size), (LAYER + "mlp.up_proj", ffn.size))
        self.down = linear(ffn.size, (LAYER + "mlp.down_proj", hidden))
        self.head = linear(hidden, ("lm_head", own.vocab_size))
        self.embedded_norm, self.feature_norm = norm(LAYER + "input_layernorm"), norm(LAYER + "hidden_norm")
        self.ffn_norm, self.norm = norm(LAYER + "post_attention_layernorm"), norm("norm")
        self.embed = Embedding(make, EMBEDDING, 0, hidden)
        self.token_ids = np.arange(own.vocab_size, dtype=np.int32)
        """int32 [draft vocabulary]: the model's ids."""
        self.variant = variant_of(mixer, device)
        self.cos_sin = torch.empty(0)
        self._device = device

    def reach(self, max_model_len: int) -> None:
        """Make the rotary table for so many positions."""
        rope = self.arch.arch.layers[0].mixer.rope
        assert rope is not None  # a Llama's
        self.cos_sin = rope_table(rope, self.arch.arch.head_dim, max_model_len).to(self._device)

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        context: Context,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids, positions: [n]; features: [n, hidden], not used afterwards; wanted: int64 [m], rows → their states
        [m, hidden], which are the features of the next guess, and logits [m, draft vocabulary] float32."""
        qkv = self.embedded_qkv(self.embed(token_ids), norm=self.embedded_norm.pair)
        qkv = self.feature_qkv(features, norm=self.feature_norm.pair, residual=qkv)
        q = context.store(0, qkv, None, None, 0.0, positions, self.cos_sin)
        y = context.attend(0, q, self.variant).flatten(1)[wanted]
        x = self.out(y, residual=features[wanted])
        x = self.down(self.up(x, norm=self.ffn_norm.pair, silu_mul=True), residual=x)
        logits = torch.empty((len(x), len(self.token_ids)), dtype=torch.float32, device=x.device)
        return x, self.head(x, norm=self.norm.pair, out=logits)

    @property
    def linears(self) -> list[Linear]:
        """All matrices."""
        return [*self.joins, self.embedded_qkv, self.feature_qkv, self.out, self.up, self.down, self.head]

    @property
    def norms(self) -> list[Norm]:
        """All norms."""
        return [self.embedded_norm, self.feature_norm, self.ffn_norm, self.norm]

    @property
    def n_bytes(self) -> int:
        """Of its parameters, the model's table left out."""
        own = sum(linear.n_bytes for linear in self.linears) + sum(norm.tensors[0].nbytes for norm in self.norms)
        return own + (self.embed.weight.nbytes if self.has_embedding else 0)

    has_embedding = False
    """Whether the table is its own."""

    # ---- loading -------------------------------------------------------------------------------------------------

    def fill(self, tensors: dict[str, torch.Tensor], embed: Embedding, where: pathlib.Path) -> None:
        """Take the values of a checkpoint. Raises LoadError: missing, left-over or mis-shaped tensors."""
        expected = dict(self._expected())
        for name in (EMBEDDING, OFFSETS):
            optional = name == EMBEDDING or len(self.token_ids) == self.arch.vocab_size
            if optional and name not in tensors:
                expected.pop(name)
        _check(tensors, expected, where)
        hidden = self.arch.arch.hidden_size
        for linear, columns in self._columns():
            for part, (name, _) in enumerate(linear.matrix.parts):
                linear.part(part)["weight"].copy_(tensors[f"{name}.weight"][:, columns])
        for norm in self.norms:
            norm.tensors[0].copy_(tensors[f"{norm.table.name}.weight"])
        for linear in self.linears:
            linear.finish()
        self.embed, self.has_embedding = embed, EMBEDDING in tensors
        if self.has_embedding:
            self.embed = Embedding(lambda *shape: tensors[EMBEDDING].to(self.dtype), EMBEDDING, 0, hidden)
        if OFFSETS in tensors:
            self.token_ids = self._map(tensors[OFFSETS], where)

    def _columns(self) -> Iterator[tuple[Linear, slice]]:
        """Each matrix, and which columns of the checkpoint's it has."""
        hidden = self.arch.arch.hidden_size
        beside = [*enumerate(self.joins), *enumerate((self.embedded_qkv, self.feature_qkv))]
        for place, linear in beside:
            yield linear, slice(place * hidden, (place + 1) * hidden)
        for linear in (self.out, self.up, self.down, self.head):
            yield linear, slice(None)

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of each tensor of the checkpoint that is read."""
        hidden = self.arch.arch.hidden_size
        for linear in self.linears:
            width = {"fc": N_TAPS * hidden, **{name: 2 * hidden for name, _ in self.feature_qkv.matrix.parts}}
            for name, n in linear.matrix.parts:
                yield f"{name}.weight", (n, width.get(name, linear.matrix.n_in))
        for norm in self.norms:
            yield f"{norm.table.name}.weight", (hidden,)
        yield EMBEDDING, (self.arch.vocab_size, hidden)
        yield OFFSETS, (len(self.token_ids),)

    def _map(self, offsets: torch.Tensor, where: pathlib.Path) -> np.ndarray:
        ids = torch.arange(len(offsets)) + offsets.long()
        wrong = ((ids < 0) | (ids >= self.arch.vocab_size)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise LoadError(
                f"{where}: {OFFSETS} gives the head's token {at} the id {int(ids[at])}, and ids are from 0 to "
                f"{self.arch.vocab_size - 1}: give a head that was trained for this model"
            )
        return ids.numpy().astype(np.int32)


def _sizes(arch: ModelArch) -> tuple[int, int, int]:
    mixer = arch.layers[0].mixer
    return mixer.q_size, mixer.kv_size, mixer.kv_size


def _check(tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], where: pathlib.Path) -> None:
    cure = "give a head in the layout of published EAGLE-3 heads, see docs/speculation.md"
    for what, names in (
        ("lacks", sorted(expected.keys() - tensors.keys())),
        ("has, which is not read,", sorted(tensors.keys() - expected.keys() - {NOT_READ})),
    ):
        if names:
            raise LoadError(f"the head {where} {what} {', '.join(map(shown, names[:8]))}: {cure}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise LoadError(
                f"the head {where}: {name} has shape {tuple(tensors[name].shape)}; its config.json implies {shape}"
            )


def load_head(folder: pathlib.Path, arch: HeadArch, model: Decoder, device: torch.device) -> Head:
    """A head with the weights of `folder` for a model, whose table it shares. Raises LoadError.

    A model that is rounded has a rounded head; one of a file's blocks, a floating one.
    """
    scheme, dtype = model.layers[0].attention.qkv.scheme, model.dtype
    if isinstance(scheme, Blocks):
        scheme = floating(device, dtype)

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    head = Head(arch, make, device, dtype, scheme)
    tensors = {name: one for shard in open_checkpoint(folder) for name, one in _read(shard)}
    head.fill(tensors, model.embed, folder)
    return head


def _read(shard: Shard) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file, on the CPU."""
    with open_shard(shard) as descriptor:
        for entry in shard.entries:
            if entry.dtype not in DTYPES:
                raise LoadError(f"tensor {entry.name} has dtype {entry.dtype}; usable are {', '.join(DTYPES)}")
            buffer = bytearray(entry.n_bytes)
            read_into(descriptor, memoryview(buffer), entry.start, shard.path)
            tensor = torch.frombuffer(buffer, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise LoadError(f"tensor {entry.name} of {shard.path} has values that are not finite")
            yield entry.name, tensor
