"""Kernels made at run time: generated Python modules and compiled libraries, in a folder that survives the process.

Life cycle: an entry is named by a digest of everything that made it (sources, headers, flags, compiler version), so it
never changes and never goes stale; it is written beside its place and renamed into it, under a file lock, so that
processes share it; a library whose content is not what was built (its sum is beside it) is built again; using an
entry renews its date; entries unused for `KEEP_DAYS` go when something new is made.
Does not own what is generated, nor Triton's own cache. Invariant: only a folder of ours that nobody else can write is
trusted; otherwise a private temporary folder serves this process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import ModuleType

from quire.core import env
from quire.core.ticker import ticking

logger = logging.getLogger("quire.kernels")

KEEP_DAYS = 60
BUILD_TIMEOUT_S = 600
_failed: dict[pathlib.Path, str] = {}
"""What this process could not build, and why: a compiler takes seconds to say the same again."""
_CUDA_PLACES = ("/usr/local/cuda/bin",)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


class BuildError(RuntimeError):
    """A kernel could not be built. The message holds the end of what the compiler said, and what to do."""


@functools.cache
def folder() -> pathlib.Path:
    """Where entries live: QUIRE_CACHE_DIR (default ~/.cache/quire) / jit, made if it is not there."""
    place, trouble = asked_folder()
    if not trouble:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
            trouble = _distrusted(place)
        except OSError as error:
            trouble = str(error)
    if not trouble:
        return place
    private = pathlib.Path(tempfile.mkdtemp(prefix="quire-jit-"))
    atexit.register(_remove, private, os.getpid())
    logger.warning(
        "kernel cache %s is not used (%s): this process builds its kernels again, in %s; "
        "set QUIRE_CACHE_DIR to a folder that only you can write",
        place, trouble, private,
    )  # fmt: skip
    return private


def asked_folder() -> tuple[pathlib.Path, str]:
    """The folder that `folder` will try, and what speaks against it ("": nothing). Creates nothing."""
    place = pathlib.Path("~/.cache/quire/jit")
    try:
        place = env.cache_folder() / "jit"
        nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
        if not nearest.is_dir():
            return place, f"{nearest} is not a folder"
        if not os.access(nearest, os.W_OK | os.X_OK):
            return place, f"{nearest} cannot be written"
        return place, _distrusted(place) if nearest == place else ""
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return place, str(error)


def _distrusted(place: pathlib.Path) -> str:
    state = place.stat()
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it"
    return "it belongs to somebody else" if state.st_uid != os.getuid() else ""


def _remove(private: pathlib.Path, maker: int) -> None:
    """At exit. A forked child inherits this and the folder, which its parent still needs."""
    if os.getpid() == maker:
        shutil.rmtree(private, ignore_errors=True)


def sources_folder() -> pathlib.Path:
    """The C++ and CUDA sources: in an installed package its own copy, in a checkout the repository's csrc."""
    package = pathlib.Path(__file__).resolve().parents[1]
    installed = package / "_csrc"
    return installed if installed.is_dir() else package.parent / "csrc"


def generated_module(name: str, source: str) -> ModuleType:
    """Import Python source as a module that lives in a file (Triton reads the file). Same source, same module."""
    return _module(f"{name}_{_digest(source)}", source)


@functools.cache
def _module(full_name: str, source: str) -> ModuleType:
    path = folder() / f"{full_name}.py"
    try:
        known = path.read_text() == source
        os.utime(path)
    except FileNotFoundError:  # new, or removed by another process in this moment
        known = False
    if not known:
        _put(path, source.encode())
    spec = importlib.util.spec_from_file_location(full_name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} cannot be imported: Python knows no loader for it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiler(name: str) -> str | None:
    """Path of "c++" or "nvcc", or None."""
    if name == "c++":
        return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return shutil.which(name) or next((f"{p}/{name}" for p in _CUDA_PLACES if os.access(f"{p}/{name}", os.X_OK)), None)


@functools.cache
def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def shared_library(
    name: str, sources: Sequence[pathlib.Path], flags: Sequence[str], header: str, compiler_name: str
) -> pathlib.Path:
    """Build sources into one shared library, with the text `header` included before everything else.

    compiler_name: "c++" or "nvcc". The files that the sources or `header` include from the sources'
    folders (`#include "..."`), directly or not, count towards the identity.
    Raises BuildError without a compiler or when it fails, which is said in the log; the process does not try it again.
    """
    path = compiler(compiler_name)
    if path is None:
        source = "the CUDA toolkit has it" if compiler_name == "nvcc" else "on Debian: apt-get install g++"
        raise BuildError(
            f"{name} needs the compiler {compiler_name!r}, which was not found on PATH: install it ({source})"
        )
    texts = _texts(sources, header)
    target = folder() / f"{name}_{_digest(*texts, *flags, _version(path))}.so"
    if target in _failed:
        raise BuildError(_failed[target])
    with _locked(target):
        if _is_whole(target):
            os.utime(target)
            os.utime(_sum_path(target))
            return target
        start_s = time.perf_counter()
        try:
            with ticking(f"building kernel {name} with {pathlib.Path(path).name}"):
                _build(path, sources, flags, header, target)
        except BuildError as error:
            _failed[target] = str(error)
            logger.warning("kernel %s could not be built: %s", name, error)
            raise
        logger.info("built kernel %s in %.1f s", target.name, time.perf_counter() - start_s)
    _prune()
    return target


def _texts(sources: Sequence[pathlib.Path], header: str) -> list[str]:
    """`header`, then the sources and all files of ours that are included, in the order of their paths."""
    folders = [source.parent for source in sources]
    texts: dict[pathlib.Path, str] = {}
    waiting = [*sources, *_included(header, folders)]
    while waiting:
        file = waiting.pop()
        if file not in texts:
            texts[file] = file.read_text()
            waiting += _included(texts[file], [file.parent, *folders])
    return [header, *(texts[file] for file in sorted(texts))]


def _included(text: str, folders: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
    """The files that a text includes by name in quotes, each from the first folder that has it, as compilers look."""
    for name in _INCLUDE.findall(text):
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is not None:
            yield found


def _build(path: str, sources: Sequence[pathlib.Path], flags: Sequence[str], header: str, target: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        included, made = pathlib.Path(scratch, "header.h"), pathlib.Path(scratch, "made.so")
        included.write_text(header)
        places = dict.fromkeys(f"-I{source.parent}" for source in sources)
        command = [path, *flags, *places, "-include", str(included), "-shared", "-o", str(made), *map(str, sources)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S, cwd=scratch
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{target.name}: {path} took more than {BUILD_TIMEOUT_S} s") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise BuildError(f"{target.name}: {path} failed with code {done.returncode}: {said[-2000:]}")
        _put(_sum_path(target), _sum(made).encode())
        os.replace(made, target)


def _is_whole(target: pathlib.Path) -> bool:
    """An entry with the content that was built: to load one that a full disk or a crash has cut short can kill us."""
    if not _sum_path(target).exists():  # new, or made before there were sums
        return False
    try:
        good = _sum_path(target).read_text() == _sum(target)
    except (OSError, UnicodeDecodeError):
        good = False
    if not good and target.exists():
        logger.warning("kernel %s is damaged: it is built again", target.name)
    return good


def _sum_path(target: pathlib.Path) -> pathlib.Path:
    return target.with_suffix(".sum")


def _sum(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _locked(target: pathlib.Path) -> Iterator[None]:
    """One builder of an entry at a time, across processes; the kernel frees the lock of a process that dies."""
    with open(target.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _put(path: pathlib.Path, content: bytes) -> None:
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(scratch, path)


def _digest(*texts: str) -> str:
    joined = "\0".join(texts)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _prune() -> None:
    oldest = time.time() - KEEP_DAYS * 86400
    for entry in folder().iterdir():  # also what builds that were killed have left
        with contextlib.suppress(OSError):  # another process may have removed it
            if entry.stat().st_mtime >= oldest:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
