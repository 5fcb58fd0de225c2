"""The cache of kernels made at run time: its names, what it trusts, what it removes."""

from __future__ import annotations

import ctypes
import os
import pathlib
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.kernels import jit

OLD_S = 86400 * (jit.KEEP_DAYS + 1)


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """An empty cache folder, for this test alone."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    jit.folder.cache_clear()
    yield tmp_path / "jit"
    jit.folder.cache_clear()


def age(path: pathlib.Path) -> None:
    then = path.stat().st_mtime - OLD_S
    os.utime(path, (then, then))


def build(tmp_path: pathlib.Path, value: int, header: str = "") -> pathlib.Path:
    """A library with one function, which returns `value`."""
    source = tmp_path / "one.cpp"
    source.write_text(f'extern "C" int one() {{ return {value}; }}')
    return jit.shared_library("one", [source], ["-O0", "-fPIC"], header, "c++")


def test_the_folder_is_private(place: pathlib.Path) -> None:
    assert jit.folder() == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_trusted(
    place: pathlib.Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    place.mkdir()
    place.chmod(mode)
    assert jit.folder() != place
    assert "others can write to it" in caplog.text and "QUIRE_CACHE_DIR" in caplog.text
    assert jit.asked_folder() == (place, "others can write to it")


def test_asking_creates_nothing(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert jit.asked_folder() == (place, "") and not list(tmp_path.iterdir())


def test_a_private_folder_goes_with_the_process_that_made_it(tmp_path: pathlib.Path) -> None:
    """A forked child that ends normally leaves it to its parent."""
    script = """
import os, sys
from quire.kernels import jit
place = jit.folder()
child = os.fork()
if not child:
    sys.exit()
os.waitpid(child, 0)
print(place, place.is_dir())
"""
    (tmp_path / "file").write_text("")
    environment = os.environ | {"QUIRE_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    place, alive = done.stdout.split()
    assert place.startswith(f"{tmp_path}/quire-jit-") and alive == "True"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    assert "QUIRE_CACHE_DIR" in done.stderr


def test_a_module_whose_file_was_changed_or_removed_is_written_again(place: pathlib.Path) -> None:
    for change in (lambda path: path.write_text("X = 2"), pathlib.Path.unlink):
        jit._module.cache_clear()
        path = pathlib.Path(jit.generated_module("number", "X = 1").__file__)
        change(path)
        jit._module.cache_clear()
        assert jit.generated_module("number", "X = 1").X == 1
        assert path.read_text() == "X = 1"


@pytest.mark.skipif(jit.compiler("c++") is None, reason="needs a C++ compiler")
def test_f17_a_damaged_library_is_built_again(
    place: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut short, with a flipped bit, empty, without its sum: to load some of these would kill the process."""
    path = build(tmp_path, 7)
    whole = path.read_bytes()
    damages = [whole[: len(whole) // 2], whole[:-1], b"", whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]]
    for damage in damages:
        path.unlink()  # what is loaded stays as it is
        path.write_bytes(damage)
        assert build(tmp_path, 7) == path
        assert ctypes.CDLL(str(path)).one() == 7
    assert caplog.text.count("is damaged: it is built again") == len(damages)
    path.with_suffix(".sum").unlink()
    made = path.stat().st_ino
    assert build(tmp_path, 7).stat().st_ino != made
    assert caplog.text.count("is damaged") == len(damages), "without a sum nothing says that it is damaged"
    path.with_suffix(".sum").write_bytes(b"\xff\xfe")
    build(tmp_path, 7)
    assert ctypes.CDLL(str(path)).one() == 7


@pytest.mark.skipif(jit.compiler("c++") is None, reason="needs a C++ compiler")
def test_libraries_are_named_by_what_made_them_and_old_entries_go(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = build(tmp_path, 1)
    made = first.stat().st_ino
    assert build(tmp_path, 1).stat().st_ino == made
    left = place / "tmpkilled"
    left.mkdir()
    (left / "header.h").write_text("")
    for entry in (first, left):
        age(entry)
    assert build(tmp_path, 1, "// another header") != first
    assert not first.exists()
    assert not left.exists()
    with pytest.raises(jit.BuildError, match="no_such_name"):
        build(tmp_path, 1, "no_such_name;")
    assert not list(place.glob("tmp*"))


@pytest.mark.skipif(jit.compiler("c++") is None, reason="needs a C++ compiler")
def test_a_build_that_fails_is_said_and_not_tried_again(
    place: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[object] = []
    compile_it = jit._build
    monkeypatch.setattr(jit, "_build", lambda *arguments: (tried.append(arguments), compile_it(*arguments)))
    for _ in range(2):
        with pytest.raises(jit.BuildError, match="no_such_name"):
            build(tmp_path, 2, "no_such_name;")
    assert len(tried) == 1
    (said,) = caplog.records
    assert said.name == "quire.kernels" and "kernel one could not be built" in said.getMessage()
    build(tmp_path, 3)
    assert len(tried) == 2


def test_a_library_is_named_by_every_file_that_it_includes(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Through folders and through the header that is included before everything; not by what lies beside."""
    files = {
        "one.cpp": '#include "part/a.h"\nextern "C" int one() { return A; }',
        "part/a.h": '#pragma once\n#include <vector>\n#include "part/b.h"\n#include "near.h"\n#define A (B + NEAR)',
        "part/b.h": '#pragma once\n  # include "part/a.h"\n#define B 1',
        "part/near.h": "#define NEAR 1",
        "first.h": "#define FIRST 1",
        "other.h": "#define OTHER 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def texts() -> list[str]:
        return jit._texts([tmp_path / "one.cpp"], '#include "first.h"\n')

    before = texts()
    assert len(before) == 6
    for name in files:
        (tmp_path / name).write_text(files[name] + "\n// changed\n")
        assert (texts() != before) == (name != "other.h"), name
        (tmp_path / name).write_text(files[name])
    assert texts() == before


@pytest.mark.parametrize("sources", [("decode.cu",), ("prefill.cu",), ("gemm.cu", "gemm_wide.cu")], ids=str)
def test_every_part_of_a_cuda_kernel_counts(sources: tuple[str, ...]) -> None:
    """`prefill.cu` includes what lies in prefill/; both kernels of products share a folder."""
    folder = jit.sources_folder() / "cuda"
    texts = jit._texts([folder / one for one in sources], '#include "attention.h"\n')
    parts = sorted((folder / sources[0].removesuffix(".cu")).glob("*.h"))
    assert parts and [part.name for part in parts if part.read_text() not in texts] == []
    for source in sources:
        assert (folder / "hopper.h").read_text() in jit._texts([folder / source], "")
