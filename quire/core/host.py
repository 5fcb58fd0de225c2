"""What memory this machine has, and how much of it this process may still take: the kernel's own figures, no torch.

Owns the reading of /proc, control groups (versions 1 and 2, every group above this process) and resource limits. Does
not own what is done with it. Invariant: what cannot be read limits nothing; files that the system keeps in memory for
speed count as free, here and in a group.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import resource
from collections.abc import Iterator
from typing import Final

UNLIMITED: Final = 1 << 62
"""Groups of version 1 without a limit state about 2**63."""
ROOT: Final = pathlib.Path("/")
CACHES: Final = ("inactive_file", "active_file", "slab_reclaimable")
"""Of memory.stat: what a group gives back before it is out of memory."""


def total_bytes(root: pathlib.Path = ROOT) -> int:
    """Main memory, or the lowest limit of a control group; 0 when unknown."""
    return min([_meminfo(root).get("MemTotal", 0), *(limit for limit, _ in _groups(root))])


def free_bytes(root: pathlib.Path = ROOT) -> int:
    """Memory without swap that this process may still take, by the machine and its control groups; 0 when unknown."""
    groups = [max(0, limit - used) for limit, used in _groups(root)]
    return min([_meminfo(root).get("MemAvailable", 0), *groups])


def trim_heap() -> None:
    """Give the system back what the C library's allocator holds free, where it is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def n_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def busy_s(root: pathlib.Path = ROOT) -> float:
    """Seconds that all cores of this machine together have worked since it started, or were another machine's; 0 when
    unknown."""
    try:
        words = (root / "proc" / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, soft, steal = map(int, words[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def swap_bytes(root: pathlib.Path = ROOT) -> int:
    """Swap that is free."""
    return _meminfo(root).get("SwapFree", 0)


def resident_bytes(root: pathlib.Path = ROOT) -> int:
    """Memory of this process, files that it only maps left out."""
    return _own(root)[1]


def address_bytes(root: pathlib.Path = ROOT) -> int:
    """Address space that this process may still map (ulimit -v), `UNLIMITED` without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return UNLIMITED if limit in (resource.RLIM_INFINITY, -1) else max(0, limit - _own(root)[0])


def _own(root: pathlib.Path) -> tuple[int, int]:
    """(address space, resident bytes without files) of this process."""
    fields = _text(root / "proc/self/statm").split()
    if len(fields) < 3:
        return 0, 0
    n_mapped, n_resident, n_files = (int(field) * os.sysconf("SC_PAGE_SIZE") for field in fields[:3])
    return n_mapped, n_resident - n_files


def _meminfo(root: pathlib.Path) -> dict[str, int]:
    """Bytes by name; empty where there is no /proc."""
    rows = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[1].isdigit()}


def _groups(root: pathlib.Path) -> Iterator[tuple[int, int]]:
    """(limit, what is in use and cannot be given back) of each group that holds this process and has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _above(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _above(root / "sys/fs/cgroup/memory", path, *names)


def _above(mount: pathlib.Path, path: str, limit: str, usage: str, prefix: str) -> Iterator[tuple[int, int]]:
    """From the process's group up to the mount. In a container the path may be the host's and not exist here; its own
    group is then the mount itself."""
    folder = mount / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group == mount.parent:
            return
        bound, used = (_text(group / name).strip() for name in (limit, usage))
        if bound.isdigit() and used.isdigit() and int(bound) < UNLIMITED:
            stat = dict(row.split()[:2] for row in _text(group / "memory.stat").splitlines() if len(row.split()) >= 2)
            given = sum(int(stat.get(prefix + name, "0")) for name in CACHES)
            yield int(bound), max(0, int(used) - given)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
