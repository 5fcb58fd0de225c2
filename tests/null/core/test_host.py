"""What this process may still take: machine, control groups of both versions, limits of the process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from quire.core import host

MIB = 1 << 20
GIB = 1 << 30


def machine(root: pathlib.Path, group: str, **files: str) -> pathlib.Path:
    """A root with 16 GiB, 12 of them free, in `group`; files: path under /sys/fs/cgroup with __ for / → content."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB\nSwapFree: 1024 kB\n")
    (root / "proc/self/cgroup").write_text(group)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_machine_without_limits(tmp_path: pathlib.Path) -> None:
    root = machine(tmp_path, "0::/\n")
    assert (host.total_bytes(root), host.free_bytes(root), host.swap_bytes(root)) == (16 * GIB, 12 * GIB, MIB)


def test_version_2_counts_every_group_above_and_not_the_cache(tmp_path: pathlib.Path) -> None:
    root = machine(
        tmp_path, "0::/user/job\n",
        **{
            "user__job__memory.max": "max\n", "user__job__memory.current": str(GIB),
            "user__memory.max": str(4 * GIB), "user__memory.current": str(3 * GIB),
            "user__memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nslab_reclaimable 0\n",
        },
    )  # fmt: skip
    assert host.total_bytes(root) == 4 * GIB
    assert host.free_bytes(root) == 4 * GIB - (3 * GIB - GIB * 3 // 2)


def test_version_1_and_a_path_that_is_only_the_hosts(tmp_path: pathlib.Path) -> None:
    files = {
        "memory__memory.limit_in_bytes": str(2 * GIB), "memory__memory.usage_in_bytes": str(GIB),
        "memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    }  # fmt: skip
    root = machine(tmp_path, "5:cpu,memory:/docker/abc\n1:pids:/x\n", **files)
    assert (host.total_bytes(root), host.free_bytes(root)) == (2 * GIB, GIB + GIB // 4)
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert (host.total_bytes(root), host.free_bytes(root)) == (16 * GIB, 12 * GIB)


def test_nothing_to_read(tmp_path: pathlib.Path) -> None:
    assert host.total_bytes(tmp_path) == host.free_bytes(tmp_path) == host.resident_bytes(tmp_path) == 0


def test_this_machine() -> None:
    assert 0 < host.free_bytes() <= host.total_bytes()
    assert 0 < host.resident_bytes() < host.total_bytes()


def test_how_busy_the_cores_were(tmp_path: pathlib.Path) -> None:
    assert host.busy_s(tmp_path) == 0, "nobody says"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text("cpu  100 20 30 9999 888 4 6 40 0 0\ncpu0 1 2 3\n")
    assert host.busy_s(tmp_path) == 200 / os.sysconf("SC_CLK_TCK")
    assert 0 < host.busy_s() <= host.busy_s()


def test_the_limit_on_address_space() -> None:
    """In a process of its own: what is left shrinks with what is mapped."""
    code = (
        "import mmap, resource; from quire.core import host\n"
        "assert host.address_bytes() == host.UNLIMITED\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({4 * GIB}, {4 * GIB}))\n"
        "before = host.address_bytes()\n"
        f"held = mmap.mmap(-1, {GIB})\n"
        f"assert 2 * {GIB} < before < 4 * {GIB} and before - host.address_bytes() >= {GIB}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ), timeout=120)
