"""The lazy registry of implementations: which module runs an op. Imports a module when its op is called.

Invariants: CUDA means the Hopper kernels where an op has them and they can run, else Triton, and a warning says why,
once for each reason. CPU means the native library when it is loaded, else the torch reference (`native.explain()` says
which and why). The choice depends on shapes, types, alignment and the machine, never on values.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import Any

from quire.core.errors import ConfigError

logger = logging.getLogger("quire.kernels")


def choose(op: str, device_type: str, *arguments: Any) -> ModuleType:
    """The module that runs an op that has Hopper kernels ('norm', 'qkv', 'act') on these arguments.

    arguments: what the op's `hopper.obstacle` takes, the first with one row a token; beyond its `MAX_ROWS` Triton is as
    fast or faster. Raises ConfigError as `module` does.
    """
    if device_type == "cuda":
        best = _hopper(op)
        if len(arguments[0]) <= best.MAX_ROWS:
            found = best.obstacle(*arguments)
            if found is None:
                return best
            _warn(op, found)
    return module(op, device_type)


@functools.cache
def module(op: str, device_type: str) -> ModuleType:
    """The module that implements `op` ('norm', 'flash', ...) for tensors on 'cpu' or 'cuda'; on CUDA in Triton.

    Raises ConfigError for another device, or when Triton is missing on CUDA.
    """
    if device_type == "cpu":
        return importlib.import_module(f"quire.kernels.{op}.cpu")
    if device_type != "cuda":
        raise ConfigError(f"op {op!r} has no kernel for device {device_type!r}: use 'cpu' or 'cuda'")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"op {op!r} on cuda needs Triton, which is not installed: pip install triton")
    return importlib.import_module(f"quire.kernels.{op}.triton")


@functools.cache
def _hopper(op: str) -> ModuleType:
    return importlib.import_module(f"quire.kernels.{op}.hopper")


@functools.cache
def _warn(op: str, obstacle: str) -> None:
    logger.warning("%s: 'triton' runs instead of the faster 'hopper' (%s)", op, obstacle)
