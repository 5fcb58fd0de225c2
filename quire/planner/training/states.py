"""Weights, gradients and optimizer states of a device: 16 bytes a parameter with Adam, or a share of it under ZeRO.

Rajbhandari et al. 2020, arXiv 1910.02054, section 5: with W, G and K bytes a parameter and N replicas a device has
stage 0 W + G + K, stage 1 W + G + K/N, stage 2 W + (G + K)/N, stage 3 (W + G + K)/N. Owns also which parameters a
device has under tensor and pipeline parallelism.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.layers import LayerSpec
from quire.config.parameters import layer_parameters
from quire.config.stages import stage_layers
from quire.planner.training.setup import OPTIMIZERS, TrainingSetup

WEIGHT_BYTES: Final = 2
"""In bfloat16: what forward and backward compute with."""


class States(msgspec.Struct, frozen=True):
    """Bytes of one device."""

    weights: float
    gradients: float
    master: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.optimizer


def states(n_parameters: float, setup: TrainingSetup) -> States:
    """Of a device that has so many parameters before replicas share them out."""
    n = setup.n_replicas
    of_state, of_gradient, of_weight = (n if setup.zero >= stage else 1 for stage in (1, 2, 3))
    return States(
        weights=n_parameters * WEIGHT_BYTES / of_weight,
        gradients=n_parameters * setup.gradient_bytes / of_gradient,
        master=n_parameters * setup.master_bytes / of_state,
        optimizer=n_parameters * OPTIMIZERS[setup.optimizer].state_bytes / of_state,
    )


def stage_parameters(arch: ModelArch, tensor_parallel: int, n_stages: int) -> list[float]:
    """Parameters of one device of each stage. The first stage has the embedding, the last the norm and the head, which
    is a copy of a tied embedding where there are several. ConfigError where heads cannot be divided."""
    found = [
        float(sum(device_parameters(arch.layers[i], arch.hidden_size, tensor_parallel) for i in layers))
        for layers in stage_layers(arch.n_layers, n_stages)
    ]
    table = arch.vocab_size * arch.hidden_size / tensor_parallel
    found[0] += table + arch.n_positions * arch.hidden_size
    found[-1] += _norm_numbers(arch) + (arch.vocab_size / tensor_parallel if arch.head_bias else 0)
    found[-1] += 0 if arch.tie_embeddings and n_stages == 1 else table
    return found


def _norm_numbers(arch: ModelArch) -> int:
    return (int(arch.norm.weight) + int(arch.norm.bias)) * arch.hidden_size


@functools.lru_cache(maxsize=1024)
def device_parameters(spec: LayerSpec, hidden_size: int, tensor_parallel: int) -> int:
    """Of a layer, on one of several tensor-parallel devices."""
    if tensor_parallel > 1:
        mixer, ffn = spec.mixer.share(0, tensor_parallel), spec.ffn.share(0, tensor_parallel)
        spec = msgspec.structs.replace(spec, mixer=mixer, ffn=ffn)
    parameters = layer_parameters(spec, hidden_size, 0)
    found = sum(matrix.n_out * (matrix.n_in + int(matrix.bias)) for matrix in parameters.matrices)
    found += sum(math.prod(norm.shape) * (int(norm.spec.weight) + int(norm.spec.bias)) for norm in parameters.norms)
    tensors = (*parameters.mixer.tensors.values(), *parameters.ffn.tensors.values())
    return found + sum(math.prod(tensor.shape) for tensor in tensors)
