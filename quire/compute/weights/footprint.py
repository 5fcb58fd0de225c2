"""How much memory the weights of a model will take, from headers and shapes alone: nothing is allocated or read.

Owns the arithmetic of what `loader` will do: the most that is there at once on the way, by what the schemes declare.
Invariant: `held_bytes` is `Decoder.n_bytes` of the loaded model (tests compare them for every scheme).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib

import torch

from quire.compute.dist.comm import Comm, SoloComm
from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder, decoder_on
from quire.compute.models.rank_parts import RankParts
from quire.compute.schemes.choice import Schemes, choose
from quire.compute.schemes.packed import Scheme
from quire.compute.schemes.scheme import FilledScheme
from quire.compute.weights import dummy
from quire.compute.weights.coded import CodedTensor
from quire.compute.weights.found import Copy, Found
from quire.compute.weights.loader import find_copies
from quire.config.arch import ModelArch
from quire.config.families import Order
from quire.config.parameters import shapes
from quire.config.stages import LayerRange


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a model's weights."""

    held_bytes: int
    """Once loaded."""
    peak_bytes: int
    """Most at once while they are loaded: a matrix is there in both forms while it is finished."""
    address_bytes: int
    """Most address space: all matrices are allocated before the first is filled."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of one matrix."""

    matrix_bytes: int
    """As floating numbers, before it is finished; 0 where it never is there as such, or another layer owns it."""
    made_bytes: int
    """Of what is stored instead; 0 where that is the matrix itself."""
    is_begun: bool
    """What is stored is there from the beginning, to be filled."""


def _sizes(linear: Linear, scheme: Scheme) -> _Sizes:
    n, k = linear.matrix.n_out, linear.matrix.n_in
    is_begun = isinstance(scheme, FilledScheme)
    matrix_bytes = 0 if is_begun or linear.is_tied or linear.weight is None else linear.weight.nbytes
    return _Sizes(matrix_bytes, 0 if scheme.keeps_matrix else scheme.n_bytes(n, k), is_begun)


class Weights:
    """The weights that an engine would load from `folder`."""

    def __init__(
        self,
        folder: pathlib.Path,
        arch: ModelArch,
        device: torch.device,
        load_format: str = "auto",
        comm: Comm | None = None,
        layers: LayerRange | None = None,
    ) -> None:
        """Reads the headers. comm, layers: as `load_model`. Raises LoadError or ConfigError, as that would."""
        self.device, self._arch, self.comm = device, arch, SoloComm() if comm is None else comm
        self._layers, self._load_format = layers, load_format
        self._is_dummy = load_format == "dummy"
        self._copies: list[Copy] = []
        self._coded: list[CodedTensor] = []
        self._found: Found | None = None
        if not self._is_dummy:
            self._found = found = find_copies(folder, self._model(torch.bfloat16), load_format)
            self._copies = [copy for shard_copies in found.copies for copy in shard_copies if not copy.compare]
            self._coded = found.coded

    def footprint(self, dtype: torch.dtype, quantization: str) -> Footprint:
        """With parameters of `dtype` and a value of `--quantization`. ConfigError: the ranks cannot share it."""
        model, schemes = self._model(dtype, self.comm, self._layers), self._schemes(dtype, quantization)
        RankParts(self._arch, schemes, self.comm.rank, self.comm.size)  # or it is refused
        owners, parts = model.owners(), dict(model.weights())
        sizes = {linear: _sizes(linear, schemes.of(linear.matrix)) for linear in model.linears()}
        left = collections.Counter(owners.values())
        now_bytes = peak_bytes = 0
        for name in list(parts) if self._is_dummy else self._names(model):
            linear = owners.get(name)
            if linear is None or name.endswith(".bias") or sizes[linear].matrix_bytes:
                now_bytes += parts[name].nbytes
            if linear is None:
                continue
            left[linear] -= 1
            made_bytes = sizes[linear].made_bytes
            if not left[linear] and made_bytes:
                peak_bytes = max(peak_bytes, now_bytes + made_bytes)
                now_bytes += made_bytes - sizes[linear].matrix_bytes
        if model.range.is_last and model.head.is_tied:
            now_bytes += sizes[model.head].made_bytes
        peak_bytes = max(peak_bytes, now_bytes) + self._scratch_bytes(model, schemes, dtype)
        others_bytes = sum(part.nbytes for name, part in parts.items() if name not in owners or name.endswith(".bias"))
        mapped_bytes = others_bytes + sum(
            one.matrix_bytes + (one.made_bytes if one.is_begun else 0) for one in sizes.values()
        )
        mapped_bytes += max(one.made_bytes for one in sizes.values())
        return Footprint(now_bytes, peak_bytes, max(mapped_bytes, peak_bytes))

    def beside(self, folder: pathlib.Path, arch: ModelArch) -> Weights:
        """Those of another model, on the same device and divided alike."""
        return Weights(folder, arch, self.device, self._load_format, self.comm)

    def layers_of(self, dtype: torch.dtype, quantization: str) -> tuple[Decoder, Scheme]:
        """The rank's model, nowhere in memory, and what its first matrix is kept as."""
        model = self._model(dtype, self.comm, self._layers)
        return model, self._schemes(dtype, quantization).of(model.layers[0].linears[0].matrix)

    def _names(self, model: Decoder) -> list[str]:
        """The parameters in the order of the files."""
        wholes = model.wholes()
        targets = [one.target for one in self._copies] + [one.target for one in self._coded]
        parts = (wholes[target][1] if target in wholes else [target] for target in targets)
        own = dict(model.weights())
        return [name for names in parts for name in names if name in own]

    def _schemes(self, dtype: torch.dtype, quantization: str) -> Schemes:
        if self._found is None:
            return choose(quantization, self.device, dtype, self._arch, sources=dummy.implied(self._arch, dtype))
        return choose(quantization, self.device, dtype, self._arch, self._found.gguf_entries, self._found.sources)

    def _scratch_bytes(self, model: Decoder, schemes: Schemes, dtype: torch.dtype) -> int:
        """Largest tensor of which `model` has a part that is taken out of the whole in memory, or what a matrix of
        codes takes on its way."""
        regions = model.regions()
        if self._is_dummy:
            codes, all_shapes = dummy.held(self._arch, schemes), list(shapes(self._arch))
            wholes = [shape for name, shape in all_shapes if name in regions and name not in codes]
            of_coded = max((dummy.scratch_bytes(*shape) for name, shape in all_shapes if name in codes), default=0)
        else:
            mixed = [one for one in self._copies if one.target in regions and one.rows.order is not Order.ROWS]
            wholes = [one.entry.shape for one in mixed]
            of_coded = max((one.scratch_bytes for one in self._coded), default=0)
        return max(max(map(math.prod, wholes), default=0) * dtype.itemsize, of_coded)

    def _model(self, dtype: torch.dtype, comm: Comm | None = None, layers: LayerRange | None = None) -> Decoder:
        """Without memory, and with its matrices unfinished. None: the whole."""
        return decoder_on(torch.device("meta"), self._arch, dtype, 1, comm=comm, layers=layers)
