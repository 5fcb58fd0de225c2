"""What a kernel may have of shared memory is an attribute on each device: on a fake runtime with two of them."""

from __future__ import annotations

import ctypes
import pathlib
import shutil

from quire.kernels import jit

RUNTIME = """
using cudaError_t = int;
constexpr int cudaSuccess = 0, cudaFuncAttributeMaxDynamicSharedMemorySize = 8, carveout = 9;
static int device, n_asked, fails;
static cudaError_t cudaGetDevice(int* found) { return *found = device, 0; }
static cudaError_t cudaFuncSetAttribute(void (*)(), int, int) { return n_asked++, fails; }
#include "shared_memory.h"
static void one() {}
static void other() {}
extern "C" int ask(int on, int which, int n_bytes, int is_failing) {
    device = on, fails = is_failing, n_asked = 0;
    const int error = which == 2   ? quire::raise_attribute<one, carveout>(n_bytes)
                      : which == 1 ? quire::allow_shared_memory<other>(n_bytes)
                                   : quire::allow_shared_memory<one>(n_bytes);
    return error ? -error : n_asked;
}
"""


def test_each_device_is_asked_once_for_each_kernel(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "fake.cpp"
    source.write_text(RUNTIME)
    shutil.copy(jit.sources_folder() / "cuda" / "shared_memory.h", tmp_path)
    flags = ["-std=c++17", "-shared", "-fPIC"]
    ask = ctypes.CDLL(str(jit.shared_library("fake", [source], flags, "", "c++"))).ask
    asked = [ask(*given) for given in (
        (0, 0, 4096, 7),  # it fails, and is asked again
        (0, 0, 4096, 0), (0, 0, 4096, 0), (0, 0, 1024, 0),  # enough
        (0, 0, 8192, 0), (0, 0, 8192, 0),  # more
        (1, 0, 8192, 0), (1, 0, 8192, 0),  # another device
        (0, 1, 4096, 0),  # another kernel
        (0, 2, 100, 0), (0, 2, 100, 0), (1, 2, 100, 0),  # another attribute
        (64, 0, 4096, 0), (64, 0, 4096, 0),  # one that is not remembered
    )]  # fmt: skip
    assert asked == [-7, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1]
