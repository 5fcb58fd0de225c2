"""Random weights of realistic scale, for speed measurements without a checkpoint: floating, or in the codings that
config.json names.

Owns which matrices a checkpoint of such a config.json would have coded, and the filling. Does not own random codes
(`random_codes`) nor schemes. Invariant: ranks have parts of the weights that one rank alone has.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch

from quire.compute.models.decoder import Decoder
from quire.compute.schemes.choice import Schemes
from quire.compute.schemes.coded import PIECE_VALUES, Source
from quire.compute.schemes.scheme import FilledScheme
from quire.compute.weights import coded
from quire.compute.weights.names import Names
from quire.compute.weights.pieces import take
from quire.compute.weights.random_codes import SCALE, random_coded
from quire.compute.weights.targets import Targets
from quire.config.arch import ModelArch
from quire.config.codings import Codings, Layout
from quire.config.parameters import HEAD, Kept, Matrix, matrices
from quire.config.pattern import PatternError
from quire.core.errors import ConfigError
from quire.core.ticker import ticking
from quire.core.units import format_bytes

SCALE_DTYPES: Final = {Layout.MXFP4: "U8", Layout.NVFP4: "F8_E4M3"}
"""As files name them. Other layouts' scales are of the model's dtype, or of float16."""
_logger = logging.getLogger(__name__)


def fill_random(weights: Iterable[tuple[str, torch.Tensor]], seed: int, device: torch.device) -> None:
    """Fill each parameter where it lives: normal(0, SCALE), norms normal(1, SCALE).

    weights: (name, tensor on `device`), in an order that decides the values. Same seed and device, same weights.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in weights:
        tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, SCALE, generator=generator)


def implied(arch: ModelArch, dtype: torch.dtype) -> dict[str, Source]:
    """Name of a parameter → how a checkpoint of `arch` would have it, of each matrix that it would have coded.

    dtype: the model's. Raises ConfigError: a pattern is not read.
    """
    if arch.codings is None:
        return {}
    names = Names(arch, in_gguf=False)
    try:
        return {
            name: source
            for matrix in matrices(arch)
            if matrix.kept is Kept.BY_SCHEME and not (arch.tie_embeddings and matrix.name == HEAD)
            for name, source in _of_matrix(matrix, arch.codings, names, dtype)
        }
    except PatternError as error:
        raise ConfigError(f"quantization_config: {error}", param="quantization_config") from None


def _of_matrix(matrix: Matrix, codings: Codings, names: Names, dtype: torch.dtype) -> Iterator[tuple[str, Source]]:
    for part, n_rows in matrix.parts:
        stored = names.in_checkpoint(f"{part}.weight")
        coding = codings.implied(stored.removesuffix(".weight"), *filter(None, [matrix.whole]))
        if coding is None:
            continue
        scale_dtype = SCALE_DTYPES.get(coding.layout, "BF16" if dtype is torch.bfloat16 else "F16")
        rows = coded.with_rows(names.parameter(stored)[1])
        yield f"{part}.weight", Source(coding, scale_dtype, coded.order_of(rows, n_rows))


def held(arch: ModelArch, schemes: Schemes) -> set[str]:
    """Names of parameters that are codes, on whatever rank they are."""
    found = (matrix for matrix in matrices(arch) if isinstance(schemes.of(matrix), FilledScheme))
    return {f"{name}.weight" for matrix in found for name, _ in matrix.parts}


def scratch_bytes(n: int, k: int) -> int:
    """Memory that a random matrix [n, k] of codes takes beside where it goes: codes in bytes, a rank's part of them, a
    comparison with NaN, scales, and a piece in other types."""
    return 4 * n * k + 3 * 4 * max(min(n * k, PIECE_VALUES), k)


def fill_model(model: Decoder, nowhere: Decoder, schemes: Schemes, sources: Mapping[str, Source], seed: int) -> None:
    """All parameters of `model`, random. nowhere: the whole model that it is a part of, without memory.

    sources: what `implied` gave, for which `schemes` were chosen.
    """
    arch, targets = model.parts.whole, Targets(model)
    targets.fillings = coded.fillings(model)
    if arch.codings is not None:
        own = {name: source.coding for name, source in sources.items() if name in targets}
        otherwise = f"not kept as such here: numbers in {str(model.dtype).removeprefix('torch.')}"
        words = coded.words(own, targets.fillings, otherwise) or "no matrix of this model is coded"
        _logger.info("random weights as of a checkpoint in %s: %s", arch.codings.method, words)
    with ticking("making random weights", sum(one.nbytes for _, one in nowhere.weights()), format_bytes) as ticker:
        codes = held(arch, schemes)  # of each a seed of its own, so that a rank makes none of another's
        fill_random(_floating(nowhere, targets, codes, model.device, ticker.advance), seed, model.device)
        for name, whole in nowhere.weights():
            if name in codes:
                generator = torch.Generator(model.device).manual_seed(_seed_of(name, seed))
                _put(targets, name, sources[name], whole, generator)
                ticker.advance(whole.nbytes)


def _floating(
    nowhere: Decoder, targets: Targets, codes: set[str], device: torch.device, advance: Callable[[int], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating weights of a whole model, as `nowhere` has them, where what was given before the next is asked for
    has its values. What the model is a part of is given whole, so that ranks have parts of one model."""
    for name, whole in list(nowhere.weights()):
        if name in codes:
            continue
        tensor, region = targets.tensors.get(name), targets.regions.get(name)
        if tensor is None or region is not None:
            full = torch.empty(whole.shape, dtype=whole.dtype, device=device)
            yield name, full
            if tensor is not None and region is not None:
                tensor.copy_(take(full, region))
            del full
        else:
            yield name, tensor
        del tensor  # or it would keep its matrix while that is finished
        advance(whole.nbytes)
        targets.filled(name)


def _seed_of(name: str, seed: int) -> int:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return number + seed & (1 << 63) - 1


def _put(targets: Targets, name: str, source: Source, whole: torch.Tensor, generator: torch.Generator) -> None:
    filling = targets.fillings.get(name)
    if filling is None:
        return
    n, k = whole.shape
    matrix = coded.part_of(random_coded(source, n, k, generator), targets.regions.get(name))
    filling.scheme.put(filling.product, filling.first_row, matrix)
