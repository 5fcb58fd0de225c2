"""What this machine is made of, for reports and for `quire doctor`. Reads files and asks nvidia-smi; needs no torch."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess

from quire.core import host

WATCHED_ISA = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
"""CPU features that decide which kernels run, x86 then Arm, as /proc/cpuinfo spells them."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "uvicorn", "fla-core", "flashinfer-python")
"""What Quire stands on, then peers of `bench kernels`."""
COMMAND_LIMIT_S = 15


def cpu_model() -> str:
    """Name of the processor."""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def isa_flags() -> list[str]:
    """Which of `WATCHED_ISA` the processor has."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    present = set(match[1].split()) if match else set()
    return [flag for flag in WATCHED_ISA if flag in present]


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of main memory, the control groups' limits counted in; zeros when unknown."""
    return host.total_bytes(), host.free_bytes()


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU as nvidia-smi reports them; empty without one."""
    fields = ("name", "memory.total", "driver_version")
    text = command_output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that decide speed, and of peers that are measured beside Quire."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, object]:
    """Everything above as one value for a report. No host name, no user, no paths."""
    return {
        "cpu": cpu_model(),
        "n_cores": n_cores(),
        "isa": isa_flags(),
        "memory_bytes": memory_bytes()[0],
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def commit() -> str:
    """Commit of the checkout that holds this package, with '+changes' if files differ; '' outside a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    head = command_output("git", "-C", str(package), "rev-parse", "HEAD").strip()
    inside = head and command_output("git", "-C", str(package), "ls-files", "--", "core/errors.py").strip()
    if not inside:
        return ""
    changes = command_output("git", "-C", str(package), "status", "--porcelain", "--untracked-files=no").strip()
    return head + ("+changes" if changes else "")


def command_output(*command: str) -> str:
    """Standard output of a command; '' when it is missing, fails or takes longer than `COMMAND_LIMIT_S`."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return ""
