"""The planner's cost of the steps of one engine: its model, formats, ranks and page size on a device of the table.

Owns how options of an engine become those of the planner. Does not own the arithmetic (`planner/cost`).
"""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.mesh import mesh_of
from quire.config.resolve import NOT_ROUNDED, EngineLimits
from quire.planner.accelerators import Accelerator
from quire.planner.calibration import Calibration
from quire.planner.coded import formats_of
from quire.planner.cost import CostModel, calibrated
from quire.planner.expert_loads import ExpertLoads
from quire.planner.formats import Formats, formats_named
from quire.planner.parts import EVEN_LOADS


def engine_cost(
    arch: ModelArch,
    config: EngineConfig,
    limits: EngineLimits,
    device: Accelerator,
    calibration: Calibration,
    loads: ExpertLoads = EVEN_LOADS,
) -> CostModel:
    """Of an engine with these limits, on as many devices as it asks for. loads: of experts. ConfigError for a format
    without a name."""
    formats = engine_formats(config, limits, arch, device)
    return calibrated(
        arch, device, formats=formats, calibration=calibration, mesh=mesh_of(config), page_size=config.block_size,
        loads=loads,
    )  # fmt: skip


def engine_formats(config: EngineConfig, limits: EngineLimits, arch: ModelArch, device: Accelerator | None) -> Formats:
    """In what its weights, keys and values are kept; device: None, one that is not known, keeps nothing as a checkpoint
    has it. ConfigError for a format without a name."""
    if config.quantization == "auto" and device is not None:
        return formats_of(arch, "auto", limits.kv_dtype, device, limits.dtype)
    weights = limits.dtype if config.quantization in NOT_ROUNDED else str(config.quantization)
    return formats_named(weights, limits.kv_dtype, limits.dtype)
