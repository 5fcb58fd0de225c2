"""`Targets`: the parameters of a model that still take values, while it is filled.

Owns which are left, and when a layer is finished. Does not own where values come from (`loader`, `dummy`).
"""

from __future__ import annotations

import collections

from quire.compute.layers.linear import Linear
from quire.compute.models.decoder import Decoder
from quire.compute.weights import coded, gguf_exact
from quire.compute.weights.found import Copy


class Targets:
    """The parameters that still take values; a layer whose last one got its values is finished and let go."""

    def __init__(self, model: Decoder, in_gguf: bool = False) -> None:
        """in_gguf: norms have the values that they multiply by, as files of llama.cpp have them."""
        self._offsets = {} if in_gguf else model.offsets()
        self._owners = model.owners()
        self._left = collections.Counter(self._owners.values())
        """Parameters of each that have not got their values."""
        self._wholes = model.wholes()
        self._whole_of = {part: whole for whole, (_, parts) in self._wholes.items() for part in parts}
        self.regions = model.regions()
        """Of names of which a rank has a part."""
        self.tensors = dict(model.weights()) | {name: whole for name, (whole, _) in self._wholes.items()}
        self.places: dict[str, gguf_exact.Place] = {}
        """Names whose blocks go there as they are."""
        self.fillings: dict[str, coded.Filling] = {}
        """Names whose codes go there as they are."""

    def __contains__(self, name: str) -> bool:
        """Whether it takes numbers or codes here; else it is another rank's."""
        return name in self.fillings or name in self.tensors

    def copied(self, copy: Copy) -> None:
        """A tensor has its numbers, in the parameter's order."""
        if copy.target in self._offsets:
            self.tensors[copy.target].add_(self._offsets[copy.target])

    def filled(self, name: str) -> None:
        """`name` has its values. Embeddings and norms stay, for the comparison with a tied head."""
        if name in self._wholes:
            whole, parts = self._wholes.pop(name)
            del self.tensors[name], whole
            for part in parts:
                self.filled(part)
            return
        layer = self._owners.pop(name, None)
        if layer is not None:
            del self.tensors[name]
            self._left[layer] -= 1
            if not self._left[layer]:
                self._forget_wholes(layer)
                layer.finish()

    def _forget_wholes(self, layer: Linear) -> None:
        """Let go of the views of parameters that have all got their values."""
        for name in (f"{part}.{kind}" for part, _ in layer.matrix.parts for kind in ("weight", "bias")):
            whole = self._whole_of.get(name)
            if whole in self._wholes:
                del self._wholes[whole], self.tensors[whole]
