"""Bytes that a device sends in a step of training, and the time that they take at least.

With ring collectives a device of n sends 2 (n-1)/n of a vector to sum it everywhere, half of that to gather or to
scatter it. Owns volumes; whether they hide behind products is not known here, so their time is given apart.
"""

from __future__ import annotations

import msgspec

from quire.config.arch import ModelArch
from quire.planner.accelerators import Accelerator
from quire.planner.training.activations import ACTIVATION_BYTES
from quire.planner.training.setup import Checkpointing, TrainingSetup
from quire.planner.training.states import WEIGHT_BYTES


class Traffic(msgspec.Struct, frozen=True):
    """Bytes that one device sends in a step."""

    data: float
    tensor: float
    pipeline: float
    data_s: float
    tensor_s: float
    pipeline_s: float

    @property
    def seconds(self) -> float:
        """If nothing of it hides behind arithmetic, nor behind one another."""
        return self.data_s + self.tensor_s + self.pipeline_s


def _part(n: int) -> float:
    return (n - 1) / n


def data_parallel_bytes(n_parameters: float, setup: TrainingSetup) -> float:
    """Of a device with so many parameters.

    Rajbhandari et al. 2020, section 7, in parameters P and one micro-batch: 2 P for stages 0 to 2 (gradients are
    scattered, then gradients or weights gathered), 3 P for stage 3 (weights are gathered forward and again backward).
    With m micro-batches stage 2 scatters, and stage 3 gathers too, in each of them.
    """
    n, m = setup.n_replicas, setup.n_micro_batches
    n_scattered = m if setup.zero >= 2 else 1
    n_gathered = 2 * m if setup.zero == 3 else 1
    gathered_bytes = setup.gradient_bytes if setup.zero == 0 else WEIGHT_BYTES
    return _part(n) * n_parameters * (n_scattered * setup.gradient_bytes + n_gathered * gathered_bytes)


def tensor_parallel_bytes(arch: ModelArch, n_layers: int, setup: TrainingSetup) -> float:
    """Shoeybi et al. 2019, section 3: two sums a layer forward, two backward, of a vector a token; two more where the
    forward pass is repeated."""
    n_sums = 6 if setup.checkpointing is Checkpointing.FULL else 4
    vector = setup.micro_tokens * arch.hidden_size * ACTIVATION_BYTES
    return 2 * _part(setup.tensor_parallel) * n_sums * n_layers * vector * setup.n_micro_batches


def pipeline_bytes(arch: ModelArch, setup: TrainingSetup) -> float:
    """A vector a token forward, and its gradient backward, to one neighbour."""
    if setup.pipeline_parallel == 1:
        return 0.0
    vector = setup.micro_tokens * arch.hidden_size * ACTIVATION_BYTES
    return 2 * vector * setup.n_micro_batches / setup.tensor_parallel


def traffic(arch: ModelArch, n_parameters: float, setup: TrainingSetup, gpu: Accelerator) -> Traffic:
    """Of a device with so many parameters. Tensor parallelism stays in a machine if it fits there; stages and replicas
    cross machines if there are several."""
    n_layers = -(-arch.n_layers // setup.pipeline_parallel)
    data = data_parallel_bytes(n_parameters, setup)
    tensor = tensor_parallel_bytes(arch, n_layers, setup)
    pipeline = pipeline_bytes(arch, setup)
    is_one_machine = setup.n_devices <= gpu.n_in_host
    # A ring over machines crosses each port with its own part: devices of a machine in one group add their ports.
    n_together = max(1, gpu.n_in_host // setup.tensor_parallel)
    of_replicas = gpu.link_bytes_per_s if is_one_machine else _across(gpu, n_together)
    of_tensors = gpu.link_bytes_per_s if setup.tensor_parallel <= gpu.n_in_host else _across(gpu, gpu.n_in_host)
    of_stages = gpu.link_bytes_per_s if is_one_machine else gpu.links.host_bytes_per_s
    return Traffic(data, tensor, pipeline, data / of_replicas, tensor / of_tensors, pipeline / of_stages)


def _across(gpu: Accelerator, n_together: int) -> float:
    """Bytes a second of a ring with so many devices in each machine."""
    return min(gpu.link_bytes_per_s, n_together * gpu.links.host_bytes_per_s)
