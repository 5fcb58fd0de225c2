"""The choice of the native library: by processor flags, off on request, and honest when it is missing."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import sys

import pytest

from quire.kernels import jit, native


def test_best_level_first() -> None:
    full = frozenset().union(*native.LEVELS.values())
    assert native.supported(full) == ["amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "portable"]
    assert native.supported(full - {"amx_bf16"}) == ["avx512bf16", "avx512vnni", "avx512", "avx2", "portable"]
    assert native.supported(full - {"avx512_bf16"}) == ["avx512vnni", "avx512", "avx2", "portable"]
    assert native.supported(frozenset({"sse2"})) == ["portable"]


def test_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    choice = native.choice.__wrapped__()
    assert choice.library is None
    assert "none was built" in choice.reason
    assert native.build_advice() in choice.reason


@pytest.mark.parametrize("has_compiler", [True, False])
def test_advice_fits_the_way_it_was_installed(
    has_compiler: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A checkout builds in place; a wheel has nothing to build from. A compiler is asked for only where none is."""
    monkeypatch.setattr(jit, "compiler", lambda name: "/usr/bin/c++" if has_compiler else None)
    package = tmp_path / "quire"
    installed = native.build_advice(package)
    assert "a wheel that was built for" in installed and "setup.py" not in installed
    (tmp_path / "setup.py").touch()
    checkout = native.build_advice(package)
    assert f"run 'python setup.py build_ext --inplace' in {tmp_path}" in checkout and "wheel" not in checkout
    for advice in (installed, checkout):
        assert ("install a C++ compiler" in advice) != has_compiler


def test_broken_library_falls_to_the_next_level(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "libquire_portable.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    choice = native.choice.__wrapped__()
    assert choice.library is None
    assert "portable: " in choice.reason
    assert "header" in choice.reason or "too short" in choice.reason


def test_a_library_from_older_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names what misses and the command; the torch path runs."""
    compiler = jit.compiler("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" long quire_interface() { return 7; }')
    library = tmp_path / "libquire_portable.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    with caplog.at_level("WARNING", logger="quire.kernels"):
        choice = native.choice.__wrapped__()
    assert choice.library is None and choice.reason in caplog.text and len(caplog.records) == 1
    for part in ("portable: it is older than the sources: it lacks quire_use_pool", "torch paths", native.REBUILD):
        assert part in choice.reason
    monkeypatch.setattr(native, "_SIGNATURES", {"quire_interface": []})
    with pytest.raises(native.StaleLibraryError, match="its structs differ"):
        native.open_level("portable")


def test_a_level_whose_registers_are_refused_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Neither is it called; the next level runs, and the reason stays visible."""
    compiler = jit.compiler("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    names = [name for name in native._SIGNATURES if name not in ("quire_enable", "quire_interface")]
    for level, error in (("avx2", 28), ("portable", 0)):
        functions = [f"void {name}() {{}}" for name in [*names, "quire_parallel"]]
        functions += [f"long quire_enable() {{ return {error}; }}", "long quire_interface() { return 0; }"]
        source = tmp_path / f"{level}.cpp"
        source.write_text('extern "C" {\n' + "\n".join(functions) + "\n}\n")
        library = tmp_path / f"libquire_{level}.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "cpu_flags", lambda: native.LEVELS["avx2"])
    choice = native.choice.__wrapped__()
    assert choice.level == "portable"
    assert "avx2: [Errno 28] the system refuses its registers (No space left on device)" in choice.reason


def test_switched_off_by_the_environment() -> None:
    code = "from quire.kernels import native; print(native.library(), native.explain())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"QUIRE_NATIVE": "0"}, capture_output=True, text=True, check=True,
        cwd=pathlib.Path(native.__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.startswith("None Native CPU kernels are off (QUIRE_NATIVE=0)")


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
def test_no_openmp_library_is_needed() -> None:
    """The kernels run on a pool of their own, beside torch's."""
    library = native.FOLDER / f"libquire_{native.choice().level}.so"
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "gomp" not in needed and "libomp" not in needed


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
def test_every_symbol_is_declared() -> None:
    library = native.open_level(native.choice().level)
    assert all(isinstance(getattr(library, name), ctypes._CFuncPtr) for name in native._SIGNATURES)
