"""Builds the native CPU kernels: the sources in csrc/cpu, once a level of instruction sets, as shared libraries.

They are optional: without a compiler the installation succeeds and Quire runs on torch alone (`quire doctor` says so).
`quire/kernels/native.py` picks the best level at run time. Everything else about the package is in pyproject.toml.
"""

import copy
import functools
import glob
import hashlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Iterable

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = "csrc/cpu"
KEPT = "build/kernels"
"""Libraries built earlier, each with a checksum in its name of all that it is made from."""
SOURCES = [
    "attention.cpp", "experts.cpp", "fused_step.cpp", "heads.cpp", "linear.cpp", "lora.cpp", "pack.cpp", "plans.cpp",
    "pool.cpp", "route.cpp", "rows.cpp", "sample.cpp", "state.cpp", "threads.cpp",
]
with open(f"{FOLDER}/build.json") as table:
    BUILD = json.load(table)
with open(f"{FOLDER}/quire_cpu.h", "rb") as header:
    INTERFACE = f"-DQUIRE_INTERFACE={zlib.crc32(header.read())}"


class BuildPackage(build_py):
    """The package with a copy of csrc, from which kernels of new variants are built at run time."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("csrc", os.path.join(self.build_lib, "quire", "_csrc"))


class BuildNative(build_ext):
    """Shared libraries for ctypes: no Python symbol in them, and no Python version in their names."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def run(self) -> None:
        """An editable installation stays on this machine: it has the levels that this processor knows."""
        known = instructions()
        if self.editable_mode and known:
            self.extensions = [ext for ext in self.extensions if plain(ext.extra_compile_args, "-m") <= known]
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Each level in a folder of its own: the same sources give objects that must never mix. What was built before
        from the same is taken as it is: an installation and a wheel of one checkout compile a level once."""
        place = self.get_ext_fullpath(ext.name)
        stem = f"{KEPT}/{ext.name.rpartition('.')[2]}"
        kept = f"{stem}.{self.checksum(ext)}.so"
        if not os.path.exists(kept):
            alone = copy.copy(self)
            alone.force = True  # times of files say nothing of flags and compilers
            alone.build_temp = os.path.join(self.build_temp, ext.name)
            super(BuildNative, alone).build_extension(ext)
            for older in glob.glob(f"{stem}.*"):
                os.remove(older)
            os.makedirs(KEPT, exist_ok=True)
            shutil.copy(place, f"{kept}.new")
            os.replace(f"{kept}.new", kept)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copy(kept, place)

    def checksum(self, ext: Extension) -> str:
        """Of sources, headers and flags, of the compiler's commands and version, and of the C library."""
        found = hashlib.sha256()
        for name in sorted([*ext.sources, *ext.depends, "setup.py"]):
            with open(name, "rb") as file:
                found.update(f"{name} {hashlib.sha256(file.read()).hexdigest()} ".encode())
        commands = {name: getattr(self.compiler, name, None) for name in sorted(self.compiler.executables)}
        given = [itertools.takewhile(lambda word: word[0] != "-", words) for words in commands.values() if words]
        versions = [version(program) for program in itertools.chain.from_iterable(given)]
        system = (platform.machine(), platform.libc_ver(), platform.mac_ver()[0])
        found.update(repr((ext.extra_compile_args, ext.extra_link_args, commands, versions, system)).encode())
        return found.hexdigest()

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def copy_extensions_to_source(self) -> None:
        self.mkpath("quire/kernels/_native")
        super().copy_extensions_to_source()


class BuildWheel(bdist_wheel):
    """One wheel for every Python: the libraries are for this system, and know nothing of the interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


@functools.cache
def version(command: str) -> str:
    """What a compiler says of itself; '' of a command that is missing, which a build will name."""
    try:
        return subprocess.run([command, "-v"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return ""


def plain(words: Iterable[str], prefix: str = "") -> set[str]:
    """Words that begin with `prefix`, without it, as compilers and the system both may spell them."""
    alike = {ord("-"): "", ord("_"): ""}
    return {word.removeprefix(prefix).translate(alike) for word in words if word.startswith(prefix)}


def instructions() -> set[str]:
    """The extensions of this processor's instruction set; none where the system does not say."""
    try:
        with open("/proc/cpuinfo") as cpus:
            flags = next((line for line in cpus if line.startswith("flags")), "")
    except OSError:
        return set()
    return plain(flags.partition(":")[2].split())


def library(level: str, flags: list[str]) -> Extension:
    """One level's library."""
    return Extension(
        f"quire.kernels._native.libquire_{level}",
        sources=[f"{FOLDER}/{name}" for name in SOURCES],
        depends=[*glob.glob(f"{FOLDER}/*.h"), f"{FOLDER}/build.json"],
        extra_compile_args=[*BUILD["flags"], *BUILD["warnings"], *flags, INTERFACE],
        extra_link_args=["-Wl,-s"] if platform.system() == "Linux" else [],
        language="c++",
        optional=True,
    )


def libraries() -> list[Extension]:
    """All levels on x86-64, the portable one elsewhere."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [library(level, flags) for level, flags in BUILD["levels"].items() if x86 or level == "portable"]


setup(
    ext_modules=libraries(),
    cmdclass={"bdist_wheel": BuildWheel, "build_ext": BuildNative, "build_py": BuildPackage},
)
