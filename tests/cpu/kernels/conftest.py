"""Makes the case builders of this folder importable, and runs the native kernels at every level this machine has."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from quire.kernels import native, selector

LEVELS = [level for level in native.supported(native.cpu_flags()) if (native.FOLDER / f"libquire_{level}.so").exists()]


@pytest.fixture(params=[*LEVELS, "torch"])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of the instruction-set level that the ops use during the test; 'torch' is the path without a library."""
    library = None if request.param == "torch" else native.open_level(request.param)
    monkeypatch.setattr(native, "library", lambda: library)
    selector.candidates.cache_clear()
    yield request.param
    selector.candidates.cache_clear()


@pytest.fixture
def native_level(level: str) -> str:
    """The same without 'torch', for what is no op: the library's functions themselves."""
    if level == "torch":
        pytest.skip("there is no library")
    return level
