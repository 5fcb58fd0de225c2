"""What all CUDA C++ kernels for Hopper share: how nvcc builds them, and which machine can run them."""

from __future__ import annotations

import ctypes
import functools
import pathlib
from collections.abc import Callable
from typing import TypeVar

import torch

from quire.kernels import jit

Built = TypeVar("Built")

LEAST_E4M3 = (8, 9)
"""Compute capability from which GPUs convert to e4m3."""
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC")


def machine_obstacle() -> str | None:
    """Why this machine cannot run kernels for Hopper, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not a Hopper GPU (compute capability 9.0)"
    if jit.compiler("nvcc") is None:
        return "nvcc was not found on PATH: install the CUDA toolkit to have the fastest kernels"
    return None


def built(build: Callable[[], Built]) -> Built | str:
    """What `build` compiles (seconds if it is new) and gives, or why this machine cannot run it."""
    found = machine_obstacle()
    if found:
        return found
    try:
        return build()
    except jit.BuildError as error:
        return str(error)


def build_obstacle(build: Callable[[], object]) -> str | None:
    """Why this machine cannot run what `build` compiles (seconds if it is new), or None."""
    found = built(lambda: (build(),))
    return found if isinstance(found, str) else None


def converts_to_e4m3(device: torch.device) -> bool:
    """Whether it is a GPU that does, as Ada, Hopper and their successors."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_E4M3


def lacks_e4m3(device: torch.device) -> bool:
    """Whether it is a GPU that is there and does not."""
    return device.type == "cuda" and torch.cuda.is_available() and not converts_to_e4m3(device)


def compile_variant(source: str, definitions: tuple[str, ...]) -> pathlib.Path:
    """The library of a source in csrc/cuda with these definitions, compiled if it is new. Raises BuildError."""
    sources, flags = [jit.sources_folder() / "cuda" / source], [*FLAGS, *definitions]
    return jit.shared_library(source.removesuffix(".cu"), sources, flags, "", "nvcc")


@functools.cache
def load_variant(source: str, definitions: tuple[str, ...]) -> ctypes.CDLL:
    """The library of `compile_variant`, for good. Many plans share one, and to find and check it takes milliseconds.

    Raises BuildError.
    """
    return ctypes.CDLL(str(compile_variant(source, definitions)))


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Kernels may be launched before the one before has ended (programmatic dependent launch), then wait for it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
