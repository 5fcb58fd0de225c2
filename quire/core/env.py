"""The environment variables that Quire reads, all of them. No other file touches `os.environ`."""

from __future__ import annotations

import os
import pathlib

from quire.core.errors import ConfigError, shown

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

VARIABLES: dict[str, str] = {
    "QUIRE_CACHE_DIR": "Folder for kernels built on demand (default ~/.cache/quire); TRITON_CACHE_DIR goes before it.",
    "QUIRE_LOG_LEVEL": "Level of the `quire` logger: DEBUG, INFO, WARNING or ERROR (default INFO).",
    "QUIRE_API_KEY": "API key of the server when --api-key is not given.",
    "QUIRE_NATIVE": "'0' ignores the compiled CPU kernels and uses the torch path.",
    "QUIRE_PEER_MEMORY": "'0' leaves all sums over several GPUs to NCCL.",
    "HF_HUB_OFFLINE": "'1' makes huggingface_hub use its cache only.",
}
"""Name → meaning. `quire doctor` prints it; `tests/arch` checks that it has at most 12 entries."""


def read(name: str, default: str = "") -> str:
    """Value of one of `VARIABLES` (KeyError for any other name), or `default` when unset."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not listed in quire.core.env.VARIABLES")
    return os.environ.get(name, default)


def cache_folder() -> pathlib.Path:
    """Where Quire keeps what it can make again. Not created here."""
    return pathlib.Path(read("QUIRE_CACHE_DIR") or "~/.cache/quire").expanduser()


def log_level() -> str:
    """QUIRE_LOG_LEVEL in capitals, INFO when unset. Raises ConfigError for a level that logging does not know."""
    level = read("QUIRE_LOG_LEVEL", "INFO").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"QUIRE_LOG_LEVEL = {shown(level)} is not a level: choose one of {', '.join(LOG_LEVELS)}")
    return level


def set_for_children(name: str, value: str) -> None:
    """Set a variable for libraries loaded later and for child processes, unless the user has set it."""
    os.environ.setdefault(name, value)


def force(name: str, value: str) -> None:
    """Set a variable for libraries loaded later and for child processes, whatever the user has set."""
    os.environ[name] = value


def unknown() -> list[str]:
    """Variables of the environment that look like Quire's and are not: likely misspelt."""
    return sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in VARIABLES)
