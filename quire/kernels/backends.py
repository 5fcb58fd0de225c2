"""The lazy registry of implementations: which module runs an op on a device. Imports Triton when a GPU op is called.

Invariant: CUDA always means Triton; CPU means the native library when it is loaded, else the torch reference
(`native.explain()` says which and why).
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

from quire.core.errors import ConfigError


@functools.cache
def module(op: str, device_type: str) -> ModuleType:
    """The module that implements `op` ('norm', 'rope', ...) for tensors on 'cpu' or 'cuda'.

    Raises ConfigError for another device, or when Triton is missing on CUDA.
    """
    if device_type == "cpu":
        return importlib.import_module(f"quire.kernels.{op}.cpu")
    if device_type != "cuda":
        raise ConfigError(f"op {op!r} has no kernel for device {device_type!r}: use 'cpu' or 'cuda'")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"op {op!r} on cuda needs Triton, which is not installed: pip install triton")
    return importlib.import_module(f"quire.kernels.{op}.triton")
