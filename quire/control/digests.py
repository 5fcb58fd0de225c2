"""Digests of prefixes: one for each whole page, equal where the prefix tree of an engine would match.

Owns how a prefix becomes digests. A digest hashes the token ids of its page and the digest of the page before, the
first one those of the salt. Two prefixes whose digests collide are only routed alike: what is reused is decided by the
tree, on exact tokens.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import Final

DIGEST_BYTES: Final = 8
MAX_DIGESTS: Final = 4096
"""Of one prompt; what lies behind changes no decision."""


def salt_digest(salt: str) -> bytes:
    """What the first page of a path stands behind. salt: as the tree has it (`cache.salt_of`)."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def following(digest: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Digests of whole pages of tokens behind the page, or the salt, that has `digest`."""
    data, n_bytes = array.array("I", token_ids).tobytes(), page_size * array.array("I").itemsize
    found = []
    for start in range(0, len(data) - n_bytes + 1, n_bytes):
        digest = hashlib.blake2b(digest + data[start : start + n_bytes], digest_size=DIGEST_BYTES).digest()
        found.append(digest)
    return found


def prompt_digests(token_ids: Sequence[int], page_size: int, salt: str = "") -> list[bytes]:
    """Of the pages of a prompt that can be found in a tree: its last token is always computed."""
    n_pages = min((len(token_ids) - 1) // page_size, MAX_DIGESTS)
    return following(salt_digest(salt), token_ids[: n_pages * page_size], page_size)


def cut_up(joined: bytes) -> list[bytes]:
    """Digests that stand one behind the other."""
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
