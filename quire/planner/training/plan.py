"""Does training fit, how long does it take, what does it send: all that follows from a model, a setup and a device.

Owns the sum over memory and the search for a setup that fits. What it does not know is in `unknowns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec
from quire.core.errors import ConfigError
from quire.planner.accelerators import Accelerator
from quire.planner.training.activations import ACTIVATION_BYTES, StageActivations, is_estimate, stage_activations
from quire.planner.training.cluster import DAY_S, HOUR_S, peak_flops
from quire.planner.training.flops import TokenFlops, active_parameters, token_flops
from quire.planner.training.setup import Checkpointing, TrainingSetup
from quire.planner.training.states import States, device_parameters, stage_parameters, states
from quire.planner.training.traffic import Traffic, traffic

OTHERS_BYTES: Final = 4 * 2**30
"""A round estimate, not measured: the device's context, buffers of collectives, what the allocator cannot use."""
DEFAULT_UTILISATION: Final = 0.45
"""Of the peak, of all that is executed. Published model FLOPs utilisations: 0.38-0.43 (Llama 3, 16,384 H100),
0.415-0.563 (Korthikanti et al. 2022, table 5, A100)."""
GATHERED_LAYERS: Final = 2
"""Whose weights a device has whole under ZeRO 3: the one that computes and the one that comes."""


class StageMemory(msgspec.Struct, frozen=True):
    """Bytes of one device of a pipeline stage."""

    n_parameters: float
    states: States
    gathered: float
    activations: StageActivations

    @property
    def total(self) -> float:
        kept = self.activations.layers + self.activations.ends + self.activations.working
        return self.states.total + self.gathered + kept + OTHERS_BYTES


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    setup: TrainingSetup
    gpu: Accelerator
    n_parameters: int
    n_active: float
    flops: TokenFlops
    stages: list[StageMemory]
    traffic: Traffic
    utilisation: float
    """Of the peak, all that is executed (HFU)."""
    model_utilisation: float
    """Of the peak, without what is computed again (MFU)."""

    @property
    def fullest(self) -> StageMemory:
        """The stage that takes the most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.gpu.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.setup.n_devices * peak_flops(self.gpu) * self.model_utilisation / self.flops.training

    @property
    def step_s(self) -> float:
        return self.setup.step_tokens / self.tokens_per_s

    def days(self, n_tokens: float) -> float:
        return n_tokens / self.tokens_per_s / DAY_S

    def device_hours(self, n_tokens: float) -> float:
        return n_tokens / self.tokens_per_s * self.setup.n_devices / HOUR_S


def stage_memories(arch: ModelArch, setup: TrainingSetup) -> list[StageMemory]:
    """Of each stage. ConfigError where a model cannot be divided so."""
    if setup.pipeline_parallel > arch.n_layers:
        raise ConfigError(
            f"{arch.n_layers} layers cannot be divided into {setup.pipeline_parallel} pipeline stages: take at most "
            f"{arch.n_layers}"
        )
    counts = stage_parameters(arch, setup.tensor_parallel, setup.pipeline_parallel)
    largest = max(device_parameters(spec, arch.hidden_size, setup.tensor_parallel) for spec in set(arch.layers))
    gathered = GATHERED_LAYERS * largest * ACTIVATION_BYTES if setup.zero == 3 and setup.n_replicas > 1 else 0
    kept = stage_activations(arch, setup)
    return [StageMemory(n, states(n, setup), gathered, own) for n, own in zip(counts, kept, strict=True)]


def plan_training(
    arch: ModelArch, setup: TrainingSetup, gpu: Accelerator, *, utilisation: float = 0.0,
    model_utilisation: float = 0.0, masked: bool = False,
) -> TrainingPlan:  # fmt: skip
    """utilisation or model_utilisation: the one that is stated; neither: `DEFAULT_UTILISATION`, all counted."""
    flops = token_flops(arch, setup.seq_len, masked=masked)
    more = flops.executed(setup.checkpointing) / flops.training
    executed = model_utilisation * more or utilisation or DEFAULT_UTILISATION
    if executed > 1:
        raise ConfigError(
            f"a utilisation of {model_utilisation or utilisation:g} with {setup.checkpointing.value} checkpointing "
            f"would take {executed:.2f} of the peak: state at most {(1 / more if model_utilisation else 1):.2f}"
        )
    stages = stage_memories(arch, setup)
    return TrainingPlan(
        setup=setup, gpu=gpu, n_parameters=arch.n_parameters, n_active=active_parameters(arch), flops=flops,
        stages=stages, traffic=traffic(arch, max(stage.n_parameters for stage in stages), setup, gpu),
        utilisation=executed, model_utilisation=executed / more,
    )  # fmt: skip


def unknowns(arch: ModelArch) -> list[str]:
    """What the numbers leave out or guess, for people."""
    found = [
        f"{OTHERS_BYTES // 2**30} GiB of each device for context, collectives and fragmentation are a guess",
        "the utilisation is stated, not predicted; traffic and the pipeline's bubble are part of what lowers it",
    ]
    if any(isinstance(layer.ffn, ExpertsSpec) for layer in arch.layers):
        found.append("experts are divided by tensor parallelism and ZeRO alone: expert parallelism is not planned")
    if is_estimate(arch):
        found.append("activations of recurrent mixers are estimated, and FLOPs of their scans left out")
    return found


def setups_that_fit(arch: ModelArch, setup: TrainingSetup, gpu: Accelerator) -> Iterator[TrainingSetup]:
    """Other ways to use the same devices that fit, cheapest first: least recomputation, then least dividing of the
    model, then the lowest stage of ZeRO."""
    levels = [one for one in Checkpointing if setup.stores_scores or one is not Checkpointing.SELECTIVE]
    parallel = [
        (tensor, stages)
        for tensor, stages in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32))
        if setup.n_devices % (tensor * stages) == 0 and stages <= arch.n_layers and tensor <= gpu.n_in_host
    ]
    parallel.sort(key=lambda pair: (pair[0] * pair[1], pair[1]))
    for checkpointing, (tensor, stages), zero in itertools.product(levels, parallel, range(4)):
        tried = msgspec.structs.replace(
            setup, checkpointing=checkpointing, tensor_parallel=tensor, pipeline_parallel=stages, zero=zero
        )
        try:
            memories = stage_memories(arch, tried)
        except ConfigError:  # its heads cannot be divided so
            continue
        if max(stage.total for stage in memories) <= gpu.memory_bytes:
            yield tried


def devices_needed(arch: ModelArch, setup: TrainingSetup, gpu: Accelerator, most: int = 1 << 17) -> int | None:
    """The smallest power of two of devices on which some setup fits; None: not even on `most`."""
    n_devices = 1
    while n_devices <= most:
        tried = msgspec.structs.replace(setup, n_devices=n_devices, tensor_parallel=1, pipeline_parallel=1)
        if next(setups_that_fit(arch, tried, gpu), None) is not None:
            return n_devices
        n_devices *= 2
    return None
