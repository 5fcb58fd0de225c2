"""The compiled CPU kernels: finds the best library for this processor, loads it with ctypes, or says why it cannot.

Owns the choice of instruction-set level; owns no arithmetic. A level's library brings the thread pool on which all
kernels run, those of variants too (csrc/cpu/pool.cpp); its threads sleep while torch's own pool works.
Invariants: `library()` is decided once a process and never changes; a library that was built with another quire_cpu.h,
or lacks a function, is never used, and a warning says what that costs. Changes of csrc/cpu/*.cpp alone are not noticed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import logging
import os
import platform
import re
import zlib
from pathlib import Path

import torch

from quire.core import env
from quire.kernels import jit

logger = logging.getLogger("quire.kernels.choice")

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"})
LEVELS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "avx512bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}
"""Level → processor flags it needs, best first."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types that the libraries know, and their numbers in csrc/cpu/quire_cpu.h."""

FOLDER = Path(__file__).parent / "_native"

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[type]] = {
    "quire_interface": [],
    "quire_use_pool": [_P],
    "quire_enable": [],
    "quire_attention": [_P],
    "quire_rms_norm": [_I, _P, _L, _L, _P, _L, _P, _P, _P, _L, _L, _L, _F, _I],
    "quire_rope": [_I, _P, _L, _L, _I, _P, _L, _L, _I, _L, _P, _I, _P, _I, _I],
    "quire_silu_mul": [_I, _P, _L, _P, _L, _L, _I],
    "quire_linear": [_P],
    "quire_lora": [_P],
    "quire_route": [_P],
    "quire_experts": [_P],
    "quire_pack": [_P],
    "quire_choose": [_P],
    "quire_convolve": [_P],
    "quire_scan_ssm": [_P],
    "quire_scan_delta": [_P],
    "quire_norm_gated": [_P],
    "quire_heads": [_P],
    "quire_apply": [_I, _I, _P, _L, _P, _L, _L, _I],
    "quire_fused_step": [_P, _L, _P],
    "quire_decode_work": [_P],
    "quire_latest_match": [_P, _L, _L, _L],
    "quire_store_kv": [_I, _I, _P, _L, _L, _P, _L, _L, _P, _P, _P, _L, _I, _I, _I, _I],
}
_RESULTS = {"quire_interface": _L, "quire_enable": _L, "quire_latest_match": _L}
"""Of functions that return something."""


REBUILD = "python setup.py build_ext --inplace (in a checkout), or reinstall"


class StaleLibraryError(OSError):
    """A library that does not fit csrc/cpu/quire_cpu.h: calling it could do anything."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenLibrary:
    """What this process uses."""

    library: ctypes.CDLL | None
    level: str
    """Name of the level, or '' when there is no library."""
    reason: str
    """One sentence for people."""


def library() -> ctypes.CDLL | None:
    """The loaded library, or None when ops must run on the torch references."""
    return choice().library


def explain() -> str:
    """One sentence: which level runs, or what was lost and why."""
    return choice().reason


@functools.cache
def choice() -> ChosenLibrary:
    """Decide once: the best level that this processor supports and whose file loads."""
    if env.read("QUIRE_NATIVE") == "0":
        return ChosenLibrary(None, "", "Native CPU kernels are off (QUIRE_NATIVE=0): slower torch paths run instead.")
    troubles = [] if any(FOLDER.glob("*.so")) else ["none was built"]
    stale = False
    for level in [] if troubles else supported(cpu_flags()):
        try:
            loaded = open_level(level)
        except OSError as error:
            troubles.append(f"{level}: {error}")
            stale = stale or isinstance(error, StaleLibraryError)
            continue
        reason = f"Native CPU kernels: level {level}."
        if stale:
            reason += f" Better ones do not fit the sources ({'; '.join(troubles)}): rebuild with {REBUILD}."
            logger.warning("%s", reason)
        elif troubles:
            reason += f" Better ones cannot be used ({'; '.join(troubles)})."
        return ChosenLibrary(loaded, level, reason)
    hint = f"rebuild with {REBUILD}" if stale else build_advice()
    reason = f"No native CPU kernels, slower torch paths run instead ({'; '.join(troubles)}): {hint}."
    if stale:
        logger.warning("%s", reason)
    return ChosenLibrary(None, "", reason)


def build_advice(package: Path = Path(__file__).parents[1]) -> str:
    """What to do where no library was built: by what is there, a checkout or an installed wheel."""
    missing = "" if jit.compiler("c++") else "install a C++ compiler (on Debian: apt-get install g++), then "
    if (package.parent / "setup.py").exists():
        return f"{missing}run 'python setup.py build_ext --inplace' in {package.parent}"
    return (
        f"{missing}install Quire again from its sources (pip install --force-reinstall FOLDER), or install a wheel"
        f" that was built for {platform.system()} {platform.machine()}"
    )


def supported(flags: frozenset[str]) -> list[str]:
    """Levels whose needs are met by these processor flags, best first."""
    return [level for level, needs in LEVELS.items() if needs <= flags]


def open_level(level: str) -> ctypes.CDLL:
    """Load one level's library and declare its functions. Raises OSError when the file is missing, does not load, or
    needs registers that the system refuses, and StaleLibraryError when it was built with another quire_cpu.h."""
    path = FOLDER / f"libquire_{level}.so"
    if not path.exists():
        raise OSError(f"{path.name} was not built")
    loaded = open_library(path, list(_SIGNATURES))
    built_from = loaded.quire_interface()
    if built_from not in (0, interface()):  # 0: built by hand
        raise StaleLibraryError("it is older than the sources: its structs differ from those of quire_cpu.h")
    refused = loaded.quire_enable()
    if refused:
        raise OSError(refused, f"the system refuses its registers ({os.strerror(refused)})")
    loaded.quire_use_pool(pool_of(loaded))
    return loaded


def required() -> ctypes.CDLL:
    """`library()` where there is one. Raises RuntimeError with the reason where there is none."""
    found = library()
    if found is None:
        raise RuntimeError(choice().reason)
    return found


def open_variant(path: Path, name: str) -> ctypes.CDLL:
    """Load a library that has the function `name` and no pool: it runs on that of the chosen level. Raises OSError."""
    loaded = open_library(path, ["quire_use_pool", name])
    loaded.quire_use_pool(pool_of(required()))
    return loaded


def open_library(path: Path, names: list[str]) -> ctypes.CDLL:
    """Load a library and declare these functions. Raises OSError when it does not load, StaleLibraryError when it has
    not all of them."""
    loaded = ctypes.CDLL(str(path))
    for name in names:
        function = getattr(loaded, name, None)
        if function is None:
            raise StaleLibraryError(f"it is older than the sources: it lacks {name}")
        function.argtypes = _SIGNATURES[name]
        function.restype = _RESULTS.get(name)
    return loaded


def interface() -> int:
    """What libraries built from the sources beside this package return from quire_interface: a checksum of the header
    with all functions and structs, as setup.py computes it."""
    return zlib.crc32((jit.sources_folder() / "cpu" / "quire_cpu.h").read_bytes())


def pool_of(level: ctypes.CDLL) -> int | None:
    """Address of the pool of a level's library."""
    return ctypes.cast(level.quire_parallel, ctypes.c_void_p).value


def build_flags(level: str) -> list[str]:
    """Compiler flags of a level: those that its library was built with."""
    table = json.loads((jit.sources_folder() / "cpu" / "build.json").read_text())
    return [*table["flags"], *table["levels"][level]]


def cpu_flags() -> frozenset[str]:
    """Flags of the first processor in /proc/cpuinfo; empty where that file does not exist."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()
