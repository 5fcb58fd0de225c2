"""For tests of several folders: GGUF files; clients that are made fast. This file also lets them import `gguf_files`,
which lies beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import httpx._transports.default
import pytest

# Each client, and so each `httpx.get`, would read the certificates of all authorities, which takes 50 ms.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)


@pytest.fixture
def write_gguf() -> Callable[..., object]:
    """`gguf_files.write_gguf`."""
    import gguf_files

    return gguf_files.write_gguf


@pytest.fixture(scope="module")
def timed_briefly() -> Iterator[None]:
    """Engines time each step and each guess of drafts once when they start: for modules that put these costs aside,
    where the best of 25 rounds took most of the time."""
    from quire.compute.draft import timing

    with pytest.MonkeyPatch.context() as patched:
        for name in ("ROUNDS", "MORE_ROUNDS", "READ_ROUNDS"):
            patched.setattr(timing, name, 1)
        yield
