"""For tests of several folders: GGUF files. This file also lets them import `gguf_files`, which lies beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def write_gguf() -> Callable[..., object]:
    """`gguf_files.write_gguf`."""
    import gguf_files

    return gguf_files.write_gguf
