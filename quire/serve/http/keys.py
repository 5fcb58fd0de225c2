"""API keys: who sends a request, and how much each may send a minute. Keys come from --api-key and --api-key-file.

Owns the file's form, its reloading and the rate limits (token buckets on the monotonic clock). Does not own what a
tenant's share of the engine is (`control/queue.py`).
Invariants: a key is looked up by a hash that is keyed with a secret of this process, so that neither the time it takes
says anything of a key nor many keys cost anything; a file that cannot be read leaves the keys as they were, at
start it is a ConfigError; a key that left the file is refused from the next look at it on (`LOOK_S`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import time
from typing import Annotated

import msgspec

from quire.core.errors import ConfigError
from quire.core.files import open_regular
from quire.serve.http.refusal import Refusal

logger = logging.getLogger("quire.serve")

LOOK_S = 1.0
"""The file is looked at no more often than this."""
MAX_FILE_BYTES = 4 << 20
MAX_RETRY_S = 120
KEY_PATTERN = re.compile(r"[\x21-\x7e]+")

_Limit = Annotated[float, msgspec.Meta(ge=0)]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One key of the file. Keys of one name are one tenant."""

    key: str
    name: str = ""
    """Shown in metrics and logs; empty: `key-` and the first letters of the key's hash."""
    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    """Prompt and output together. 0 is no limit."""


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON in --api-key-file."""

    keys: list[KeyEntry]


class Bucket:
    """So much a minute, of which a whole minute's worth may come at once; spending may leave it in debt."""

    def __init__(self, per_minute: float) -> None:
        self._size = per_minute
        self._level = per_minute
        self._time_s = time.monotonic()

    def wait_s(self) -> float:
        """Seconds until something may be spent; 0 now."""
        if not self._size:
            return 0.0
        now_s = time.monotonic()
        self._level = min(self._size, self._level + max(0.0, now_s - self._time_s) * self._size / 60)
        self._time_s = now_s
        needed = min(1.0, self._size)
        return 0.0 if self._level >= needed else (needed - self._level) * 60 / self._size

    def spend(self, amount: float) -> None:
        """Take `amount` out, whatever is in it."""
        self._level -= amount


class Tenant:
    """Whom the server works for: a key's holder, or everybody where there are no keys."""

    def __init__(
        self,
        name: str = "",
        requests_per_minute: float = 0,
        tokens_per_minute: float = 0,
        *,
        is_operator: bool = False,
    ) -> None:
        self.name = name
        self.is_operator = is_operator
        """May do what concerns every tenant."""
        self.limits = (requests_per_minute, tokens_per_minute)
        self._requests, self._tokens = Bucket(requests_per_minute), Bucket(tokens_per_minute)

    def enter(self) -> None:
        """Count a request. Raises a 429 Refusal beyond a limit of this tenant."""
        for bucket, what, limit in zip(
            (self._requests, self._tokens), ("requests", "tokens"), self.limits, strict=True
        ):
            wait_s = bucket.wait_s()
            if wait_s > 0:
                raise Refusal(
                    429,
                    f"This API key may use {limit:g} {what} a minute: try again in {math.ceil(wait_s)} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=min(MAX_RETRY_S, math.ceil(wait_s)),
                )
        self._requests.spend(1)

    def charge(self, n_tokens: int) -> None:
        """Tokens were used."""
        self._tokens.spend(n_tokens)

    def salted(self, cache_salt: str) -> str:
        """The salt under which this tenant's prefixes are cached: tenants never meet."""
        if not self.name:
            return cache_salt
        return hashlib.blake2b(f"{self.name}\0{cache_salt}".encode(), digest_size=16).hexdigest()


NOBODY = Tenant(is_operator=True)


class KeyRing:
    """All keys of a server. Raises ConfigError for a bad file; `n_shares` processes divide the rate limits."""

    def __init__(self, api_key: str | None, path: str, n_shares: int = 1) -> None:
        self._path = path
        self._n_shares = n_shares
        self._secret = secrets.token_bytes(32)
        operator = Tenant("default" if path else "", is_operator=True)
        self._fixed = {} if api_key is None else {self._digest(api_key.encode()): operator}
        self._tenants = dict(self._fixed)
        self._stamp = (0, 0)
        self._looked_s = time.monotonic()
        if path:
            self._read()

    @property
    def is_open(self) -> bool:
        """True if no key is asked for."""
        return not self._fixed and not self._path

    def find(self, given: bytes) -> Tenant | None:
        """Whose key this is; None if nobody's."""
        self._look()
        return self._tenants.get(self._digest(given))

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name, for work done later; None if its key is gone."""
        self._look()
        if self.is_open:
            return NOBODY
        return next((tenant for tenant in self._tenants.values() if tenant.name == name), None)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key.strip(), key=self._secret, digest_size=32).digest()

    def reload(self) -> None:
        """Read the file again, also if it looks the same."""
        self._stamp = (0, 0)
        self._looked_s = -math.inf
        self._look()

    def _look(self) -> None:
        now_s = time.monotonic()
        if not self._path or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            status = os.stat(self._path)
            if (status.st_mtime_ns, status.st_size) != self._stamp:
                self._read()
        except (ConfigError, OSError) as error:
            logger.error("the keys stay as they were: %s", error)

    def _read(self) -> None:
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"api_key_file {self._path} cannot be read: {error.strerror}") from None
        self._stamp = (status.st_mtime_ns, status.st_size)
        old = {tenant.name: tenant for tenant in self._tenants.values()}
        tenants = dict(self._fixed)
        for entry in _parse(data, self._path):
            key = entry.key.encode()
            name = entry.name or f"key-{hashlib.sha256(key).hexdigest()[:8]}"
            limits = (entry.requests_per_minute / self._n_shares, entry.tokens_per_minute / self._n_shares)
            same = old.get(name)
            is_same = same is not None and same.limits == limits and not same.is_operator
            tenant = same if same is not None and is_same else Tenant(name, *limits)
            tenants[self._digest(key)] = old[name] = tenant
        self._tenants = tenants


def _parse(data: bytes, path: str) -> list[KeyEntry]:
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        entries = msgspec.json.decode(data, type=KeyFile).keys
    except msgspec.DecodeError as error:
        raise ConfigError(f'api_key_file {path} must hold {{"keys": [{{"key": "..."}}]}}: {error}') from None
    if not entries:
        raise ConfigError(f"api_key_file {path} has no keys: nobody could use the server")
    for number, entry in enumerate(entries):
        if not KEY_PATTERN.fullmatch(entry.key):
            raise ConfigError(f"api_key_file {path}: keys[{number}].key is empty or has a blank or non-ASCII character")
        if not re.fullmatch(r"[\w.@-]{0,64}", entry.name):
            raise ConfigError(f"api_key_file {path}: keys[{number}].name must be at most 64 of A-Z a-z 0-9 _ . @ -")
    return entries
