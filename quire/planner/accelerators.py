"""Accelerators by name: published peaks, what was measured on some, and how they are joined.

Owns the table. Peaks are dense (half of what data sheets say with sparsity), links are one way of one device.
Memory is what the driver shows, not the name's. Sources: the makers' data sheets, named in each row; "4.39 TB/s, 790
TFLOP/s" of the H200: benchmarks/results/h200/kernels_attention.json.
"""

from __future__ import annotations

import difflib
import functools
import math
from typing import Final

import msgspec

from quire.core import host
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known, nearest
from quire.planner.calibration import Calibration, Curve, calibration_of
from quire.planner.links import Links

GIB: Final = 1 << 30
T: Final = 1e12
REFERENCE: Final = "h200"
"""Whose shares of its peaks stand for devices that nobody measured."""
ASSUMED_ERROR: Final = 0.25
"""A guess, beside what runs on the reference are off."""
HOPPER: Final = ("h100", "h200", "gh200")
OWN_SUMS: Final = ("h100", "h100-nvl")
"""Joined by NVLink, with the kernels that sum through one another's memory (`kernels/reduce`); others have NCCL."""
PCIE4, PCIE5 = 32e9, 64e9


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: dict[str, float]
    """Type of product → peak."""
    link_bytes_per_s: float
    source: str
    n_in_host: int = 8
    runs: bool = True
    """Whether Quire has kernels for it."""
    is_host: bool = False
    """Its memory is the host's main memory."""

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels in CUDA C++ run there."""
        return self.name.partition("-")[0] in HOPPER

    @property
    def links(self) -> Links:
        """Between devices of its kind."""
        return Links(device_bytes_per_s=self.link_bytes_per_s, n_in_host=self.n_in_host)


def _of(
    name: str, gib: float, tb_s: float, bf16: float, fp8: float, int8: float, link: float, source: str,
    n_in_host: int = 8, runs: bool = True,
) -> Accelerator:  # fmt: skip
    """Rates in TFLOP/s and TOP/s; 0: it has none."""
    rates = {"bfloat16": bf16, "fp8": fp8, "int8": int8}
    return Accelerator(
        name=name, memory_bytes=gib * GIB, bandwidth_bytes_per_s=tb_s * T, link_bytes_per_s=link, source=source,
        flops_per_s={kind: rate * T for kind, rate in rates.items() if rate}, n_in_host=n_in_host, runs=runs,
    )  # fmt: skip


_NVIDIA, _AMD = "NVIDIA data sheet", "AMD data sheet"
ACCELERATORS: Final = {
    one.name: one
    for one in (
        _of("a100-40", 39.4, 1.555, 312, 0, 624, 300e9, f"{_NVIDIA} A100 40 GB SXM"),
        _of("a100-80", 79.3, 2.039, 312, 0, 624, 300e9, f"{_NVIDIA} A100 80 GB SXM"),
        _of("a100-80-pcie", 79.3, 1.935, 312, 0, 624, PCIE4, f"{_NVIDIA} A100 80 GB PCIe"),
        _of("h100", 79.6, 3.35, 989.4, 1978.9, 1978.9, 450e9, f"{_NVIDIA} H100 SXM"),
        _of("h100-pcie", 79.6, 2.0, 756, 1513, 1513, PCIE5, f"{_NVIDIA} H100 PCIe"),
        _of("h100-nvl", 93.6, 3.9, 835.5, 1670.5, 1670.5, 300e9, f"{_NVIDIA} H100 NVL", n_in_host=2),
        _of("h200", 140.4, 4.8, 989.4, 1978.9, 1978.9, 450e9, f"{_NVIDIA} H200 SXM"),
        _of("gh200", 94.5, 4.0, 989.4, 1978.9, 1978.9, 450e9, f"{_NVIDIA} GH200, 96 GB", n_in_host=1),
        _of("b200", 179.0, 8.0, 2250, 4500, 4500, 900e9, f"{_NVIDIA} DGX B200"),
        _of("b300", 268.0, 8.0, 2250, 4500, 0, 900e9, f"{_NVIDIA} DGX B300"),
        _of("l4", 22.5, 0.3, 121, 242, 242, PCIE4, f"{_NVIDIA} L4"),
        _of("l40s", 45.0, 0.864, 362, 733, 733, PCIE4, f"{_NVIDIA} L40S"),
        _of("a10", 22.5, 0.6, 125, 0, 250, PCIE4, f"{_NVIDIA} A10"),
        _of("a10g", 22.5, 0.6, 70, 0, 140, PCIE4, f"{_NVIDIA} A10G"),
        _of("a40", 45.0, 0.696, 149.7, 0, 299.3, PCIE4, f"{_NVIDIA} A40"),
        _of("rtx-a6000", 48.0, 0.768, 154.8, 0, 309.7, PCIE4, f"{_NVIDIA} RTX A6000"),
        _of("rtx-3090", 24.0, 0.936, 71, 0, 284, PCIE4, "NVIDIA Ampere GA102 white paper"),
        _of("rtx-4090", 24.0, 1.008, 165.2, 330.3, 660.6, PCIE4, "NVIDIA Ada white paper, FP32 sums"),
        _of("rtx-5090", 31.8, 1.792, 209.5, 419, 838, PCIE5, "NVIDIA RTX Blackwell white paper, FP32 sums"),
        _of("t4", 14.7, 0.32, 65, 0, 130, 16e9, f"{_NVIDIA} T4 (float16: it has no bfloat16)", runs=False),
        _of("mi300x", 191.5, 5.3, 1307.4, 2614.9, 2614.9, 448e9, f"{_AMD} MI300X", runs=False),
        _of("mi325x", 255.5, 6.0, 1307.4, 2614.9, 2614.9, 448e9, f"{_AMD} MI325X", runs=False),
    )
}  # fmt: skip
"""Name → accelerator."""
ALIASES: Final = {
    "h100-sxm": "h100", "h200-sxm": "h200", "a100": "a100-80", "4090": "rtx-4090", "3090": "rtx-3090",
    "5090": "rtx-5090", "a6000": "rtx-a6000", "rtx4090": "rtx-4090", "rtx3090": "rtx-3090", "rtx5090": "rtx-5090",
}  # fmt: skip


def accelerator_named(name: str, instead: str = "") -> Accelerator:
    """ConfigError with the near names first for an unknown one, and with what can be given `instead` of a name."""
    wanted = name.lower().replace(" ", "-").replace("_", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in ACCELERATORS:
        return ACCELERATORS[wanted]
    first = [each for each in ACCELERATORS if each[:1] == wanted[:1]]
    rest = [each for each in ACCELERATORS if each not in first]
    near = [each for each in first if nearest(wanted, [each])]
    best = [max(near, key=functools.partial(_likeness, wanted))] if near else ACCELERATORS
    known = did_you_mean_and_known(wanted, best, first + rest)
    raise ConfigError(f"--gpu {shown(name)} is unknown{known}{instead}")


def _likeness(one: str, other: str) -> tuple[float, int]:
    """Letters in common, then nearness of those at the same places: h300 is more like h200 than like h100."""
    apart = sum(abs(ord(a) - ord(b)) for a, b in zip(one, other, strict=False))
    return difflib.SequenceMatcher(None, one, other).ratio(), -apart


def accelerator_seen(driver_name: str) -> Accelerator | None:
    """The one that a driver calls so, such as 'NVIDIA A100-SXM4-80GB'; None: it is not in the table."""
    words = set(driver_name.lower().replace("-", " ").replace("gb", " ").split())
    if words & {"mig", "laptop"}:  # a part of one, or another chip
        return None
    known = [one for name, one in ACCELERATORS.items() if words.issuperset(name.split("-"))]
    return max(known, key=lambda one: len(one.name), default=None)


def check_calibrated(given: Calibration, device: Accelerator) -> None:
    """ConfigError where a file has the times of another device."""
    seen = accelerator_seen(given.device)
    if given.device == "cpu" or (seen is not None and seen.name != device.name):
        near = "here" if given.device == "cpu" or seen is None else seen.name
        raise ConfigError(
            f"--calibration was measured on {'a CPU' if given.device == 'cpu' else f'the {given.device}'}, and --gpu is"
            f" {device.name}: give --gpu {near}, or leave --calibration out"
        )


USUAL_CPU: Final = Calibration(
    device="cpu", source="assumed: the limit of a usual machine of two cores, and a constant", read_bytes_per_s=45e9,
    flops_per_s={"bfloat16": 0.9e12}, products={"bfloat16": Curve()}, experts={"bfloat16": Curve()},
    attention=Curve(), step_s=2e-4, error=math.inf,
)  # fmt: skip
"""With AVX-512 and bfloat16: stands for a CPU that nobody has measured."""


def engine_calibration(device: str, device_name: str = "") -> Calibration:
    """What an engine on a 'cuda' or 'cpu' of this name is taken for; a GPU that is not in the table is a reference
    one, as only ratios matter to it."""
    if device == "cpu":
        return calibration_of("cpu") or USUAL_CPU
    return calibration_for(accelerator_seen(device_name) or accelerator_named(REFERENCE))


def host_accelerator(calibration: Calibration) -> Accelerator:
    """This machine's CPU, as a calibration of it says."""
    reads = calibration.read_bytes_per_s
    return Accelerator(
        name="cpu", memory_bytes=host.total_bytes(), bandwidth_bytes_per_s=reads, link_bytes_per_s=reads,
        flops_per_s=calibration.flops_per_s, source=calibration.source, n_in_host=1, is_host=True,
    )  # fmt: skip


@functools.cache
def assumed_calibration(name: str) -> Calibration:
    """Of a device that was not measured: the shares and fixed costs of the reference on its published peaks."""
    device, reference = accelerator_named(name), accelerator_named(REFERENCE)
    measured = calibration_of(REFERENCE)
    assert measured is not None, "it comes with Quire"
    reads = device.bandwidth_bytes_per_s * measured.read_bytes_per_s / reference.bandwidth_bytes_per_s
    rates = {kind: peak * _share(kind, measured, reference) for kind, peak in device.flops_per_s.items()}
    return msgspec.structs.replace(
        measured, device=device.name, read_bytes_per_s=reads, flops_per_s=rates, error=ASSUMED_ERROR,
        sums=measured.sums if device.name in OWN_SUMS else None,
        source=f"assumed: peaks of {device.source}, of which as much is reached as measured on the {REFERENCE.upper()}",
    )  # fmt: skip


def _share(kind: str, measured: Calibration, reference: Accelerator) -> float:
    known = kind if kind in measured.flops_per_s else "bfloat16"
    return measured.flops_per_s[known] / reference.flops_per_s[known]


def calibration_for(device: Accelerator) -> Calibration:
    """Measured where there is a file, else assumed."""
    return calibration_of(device.name) or assumed_calibration(device.name)
