"""Kernels in CUDA C++ on the host: a C++ compiler takes their sources beside stand-ins for what needs a GPU."""

from __future__ import annotations

import atexit
import ctypes
import functools
import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest

from quire.kernels import jit

STAND_INS = pathlib.Path(__file__).resolve().parent / "emulated"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
SHARED = "extern __shared__ __align__(1024) char shared[];"
EXACT = ("-ffp-contract=off",)
"""Of sums that are compared bit by bit."""


def emulated_sources(folder: pathlib.Path) -> pathlib.Path:
    """`csrc/cuda` with its stand-ins, in a new folder of this one. Skips the test without a compiler."""
    if jit.compiler("c++") is None:
        pytest.skip("needs a C++ compiler")
    made = folder / "cuda"
    shutil.copytree(jit.sources_folder() / "cuda", made)
    shutil.copytree(STAND_INS, made, dirs_exist_ok=True)
    (made / "cuda_runtime.h").touch()
    return made


def emulated_gemm_sources(folder: pathlib.Path) -> pathlib.Path:
    """`emulated_sources` with what gemm.h has without instructions (sizes, SwiGLU, tensor maps of w) from the real one,
    for gemm_wide.cu and, of codes of 4 bits and without clusters, gemm.cu."""
    made = emulated_sources(folder)
    real, emulated = (jit.sources_folder() / "cuda" / "gemm.h").read_text(), (made / "gemm.h").read_text()
    at = real.index("constexpr int OPERAND_BYTES")
    (made / "emulated_gemm.h").write_text(re.sub(r"constexpr int CHUNK = .*;", "", emulated))  # the real one is kept
    real = real[:at] + real[real.index("\n", at) :]
    kept = (
        ("// What is multiplied", "// ---- numbers and access"),
        ("// SwiGLU of pairs", "__device__ __forceinline__ uint4 load16"),
        ("constexpr CUtensorMapSwizzle W_SWIZZLE", "}  // namespace quire"),
    )
    parts = [real[real.index(first) : real.index(end)] for first, end in kept]
    text = "\n".join(['#pragma once\n#include "products.h"\nnamespace quire {', *parts, "}"])
    (made / "gemm.h").write_text(text)
    for name in ("codes.h", "wide_memory.h"):
        (made / "gemm" / name).write_text('#pragma once\n#include "../gemm.h"\n')
    for name in ("gemm.cu", "gemm_wide.cu"):
        share_memory(made / name, SHARED, "shared")
    text = (made / "gemm_wide.cu").read_text()
    text = text.replace("i / n *", "i / max(1, n) *").replace("i % n)", "i % max(1, n))")  # behind the last tile
    (made / "gemm_wide.cu").write_text(re.sub(r"asm volatile\(.*\);", "std::abort();", text))
    _replace(made / "gemm" / "results.h", r"asm volatile\(\"ld.*\);", "x = *reinterpret_cast<const uint16_t*>(from);")
    _replace(made / "gemm" / "producer.h", r"asm volatile\([^;]*;\"[^;]*\);", "(void)0;")
    first, end = r"// d \(\+\)= a b\^T", r"__device__ inline void GemmBlock::multiply\("
    product = "inline void product(float (&d)[TOKENS / 2], Operand a, Operand b, int more) {"
    product += " Product<TOKENS>::rows(d, a, b, more); }\n"
    _replace(made / "gemm" / "consumer.h", rf"(?s){first}.*?(?={end})", product)
    return made


def _replace(source: pathlib.Path, pattern: str, by: str) -> None:
    text, n = re.subn(pattern, by, source.read_text())
    assert n, (source, pattern)
    source.write_text(text)


def share_memory(source: pathlib.Path, declared: str, name: str) -> None:
    """Have what a source declares as shared memory be that of the emulated block."""
    text = source.read_text()
    assert declared in text
    source.write_text(text.replace(declared, f"char* {name} = emulated::memory;"))


def emulated_library(source: pathlib.Path, name: str, *options: str) -> ctypes.CDLL:
    """A source of such a folder, compiled with these options under a name of its own."""
    made = source.parent / f"{name}.so"
    included = ("-include", str(_standard()), f"-I{source.parent}")
    _compile(*options, *included, "-shared", "-x", "c++", str(source), made=made)
    return ctypes.CDLL(str(made))


@functools.cache
def _standard() -> pathlib.Path:
    """`standard.h`, compiled beside it: reading it takes half of what a kernel does."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="quire-emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = pathlib.Path(shutil.copy(STAND_INS / "standard.h", folder))
    _compile("-x", "c++-header", str(header), made=folder / "standard.h.gch")
    return header


def _compile(*arguments: str, made: pathlib.Path) -> None:
    compiler = jit.compiler("c++")
    assert compiler is not None
    done = subprocess.run([compiler, *FLAGS, *arguments, "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
