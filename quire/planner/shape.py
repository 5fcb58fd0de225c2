"""The numbers of a decoder that time follows from, read off its description. Owns counting of weights and K/V.

Biases, norm weights and rotary tables are left out of FLOPs; all are below 0.1 %.
"""

from __future__ import annotations

import collections
import functools
import math

from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.config.parameters import layer_parameters


@functools.lru_cache(maxsize=64)
def layer_kinds(arch: ModelArch) -> tuple[tuple[LayerSpec, int], ...]:
    """(layer, how many there are), of each different one."""
    return tuple(collections.Counter(arch.layers).items())


@functools.lru_cache(maxsize=64)
def layer_weights(arch: ModelArch) -> float:
    """Weights of the matrices of a layer, the mean of all."""
    return sum(n * _matrix_weights(spec, arch.hidden_size) for spec, n in layer_kinds(arch)) / arch.n_layers


@functools.lru_cache(maxsize=4096)
def read_weights(arch: ModelArch, n_tokens: int) -> float:
    """Of these, those that a step of so many tokens reads, the mean of all layers, where experts are chosen evenly."""
    idle = sum(n * spec.ffn.n_idle_weights(arch.hidden_size, n_tokens) for spec, n in layer_kinds(arch))
    return layer_weights(arch) - idle / arch.n_layers


def head_weights(arch: ModelArch) -> int:
    """Weights of the output head (or of the embedding, which has the same size)."""
    return arch.vocab_size * arch.hidden_size


def kv_numbers_per_token(arch: ModelArch) -> int:
    """Numbers in the K/V of one token, all layers."""
    return sum(spec.numbers for spec in arch.kv_specs.values())


def pair_flops(arch: ModelArch) -> int:
    """FLOPs of a token and one that it sees, all layers."""
    return sum(n * layer.mixer.n_pair_flops for layer, n in layer_kinds(arch))


def _matrix_weights(spec: LayerSpec, hidden_size: int) -> int:
    parameters = layer_parameters(spec, hidden_size, 0)
    tensors = sum(math.prod(tensor.shape) for tensor in parameters.mixer.tensors.values())
    return sum(matrix.n_in * matrix.n_out for matrix in parameters.matrices) + tensors
