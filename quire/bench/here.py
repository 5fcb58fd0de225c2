"""`quire plan --gpu here` or `cpu`: this machine as an accelerator of the table, probed. Needs torch.

Owns what is assumed where no calibration was measured. Does not own the probes (`ceilings`).
"""

from __future__ import annotations

import msgspec
import torch

from quire.bench.ceilings import probe
from quire.bench.kernels.timing import timer
from quire.bench.machine import gpus
from quire.config.engine import EngineConfig
from quire.core import host
from quire.engine.build import device_of
from quire.planner.accelerators import ASSUMED_ERROR, PCIE4, Accelerator, assumed_calibration
from quire.planner.calibration import Calibration, Curve

HOST_ERROR = 0.4
"""Of a CPU that only its reads and one product were measured of."""
HOST_CURVE = Curve(rows=(1, 64), fixed_s=(5e-6, 2e-5), bytes_share=0.85, flops_share=(0.6,))
KINDS = (torch.bfloat16, torch.int8)


def this_machine(is_cpu: bool) -> tuple[Accelerator, Calibration]:
    """Its CPU if that is wanted or torch sees no GPU; the calibration has measured peaks and assumed shares of them."""
    return _cpu() if is_cpu or device_of(EngineConfig()) == "cpu" else _gpu()


def _gpu() -> tuple[Accelerator, Calibration]:
    """Not run on a GPU yet."""
    clock = timer("cuda")
    found = probe(clock, [torch.bfloat16])
    found_gpus = gpus()
    mib = found_gpus[0]["memory.total"].split()[0] if found_gpus else "0"
    device = Accelerator(
        name=found.device.lower(), memory_bytes=int(mib) << 20, link_bytes_per_s=PCIE4,
        bandwidth_bytes_per_s=found.read_bytes_per_s, flops_per_s=found.flops_per_s,
        source="measured here: reads and a product; links are taken for PCIe 4",
    )  # fmt: skip
    calibration = msgspec.structs.replace(
        assumed_calibration("h200"), device=device.name, read_bytes_per_s=found.read_bytes_per_s,
        flops_per_s=found.flops_per_s, error=ASSUMED_ERROR,
        source=f"assumed: {found.device}, reads and products measured now, fixed costs as on the H200",
    )  # fmt: skip
    return device, calibration


def _cpu() -> tuple[Accelerator, Calibration]:
    clock = timer("cpu")
    found = probe(clock, list(KINDS))
    reads, flops, name = found.read_bytes_per_s, found.flops_per_s, found.device
    device = Accelerator(
        name="cpu", memory_bytes=host.total_bytes(), link_bytes_per_s=reads, bandwidth_bytes_per_s=reads,
        flops_per_s=flops, source=f"measured here, on {name}", n_in_host=1, is_host=True,
    )  # fmt: skip
    calibration = Calibration(
        device="cpu", read_bytes_per_s=reads, flops_per_s=flops, products=dict.fromkeys(flops, HOST_CURVE),
        experts={"bfloat16": HOST_CURVE},
        attention=Curve(rows=(1, 256), fixed_s=(5e-6, 2e-5), bytes_share=0.7, flops_share=(0.3,)),
        state=Curve(fixed_s=(5e-6,), bytes_share=0.5, flops_share=(0.1,)), row_kernels=Curve(fixed_s=(3e-6,)),
        step_s=1e-4, first_token_s=1e-3, error=HOST_ERROR,
        source=f"assumed: {name}, reads and products measured now, shares of them not: `quire bench calibrate` does",
    )  # fmt: skip
    return device, calibration
