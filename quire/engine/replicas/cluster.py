"""`Cluster`: the replicas of a model as a server wants them: one `AsyncLLM`, and a way to replace them.

Owns the order in which the parts begin and end, and what may change while they run. Does not own any of them.
"""

from __future__ import annotations

import secrets
from typing import Final

from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.core.adapters import module_names
from quire.core.errors import ConfigError, EngineError, shown
from quire.engine.async_llm import AsyncLLM
from quire.engine.replicas.channel import Inbox
from quire.engine.replicas.chooser import chooser_of
from quire.engine.replicas.link import ReplicaLink
from quire.engine.replicas.machine import remove_session
from quire.engine.replicas.ray import RayFleet

CLIENT_INDEX_BITS: Final = 22
"""Servers that share nothing must not share seeds either."""
FIXED: Final = (
    "model", "tokenizer", "revision", "served_model_name", "chat_template", "skip_tokenizer_init", "hf_overrides",
    "allow_special_tokens_in_text", "max_model_len", "download_dir",
)  # fmt: skip
"""Options that the server itself has gone by: they cannot change while it runs."""


class Cluster:
    """See the module. `connect`, then `load` in an event loop; at last `close`, in the thread of `connect`."""

    def __init__(self, name: str, engine: EngineConfig, cluster: ClusterConfig) -> None:
        """name: of the application in Ray; one that has it already is replaced."""
        self._engine = engine
        self._cluster = cluster
        self._chooser = chooser_of(name)
        self._fleet = RayFleet(name, engine, cluster)
        self._llm: AsyncLLM | None = None
        self._has_failed = False
        """The start, for a reason that is not an option's."""
        self._host = ""
        """Address at which replicas reach this machine."""

    def connect(self) -> None:
        """Join Ray, or start one. ConfigError if that cannot be, or it has no room for the replicas."""
        self._host = self._fleet.connect()

    async def load(self) -> AsyncLLM:
        """The replicas as one engine, once the first of them is loaded. Raises ConfigError or LoadError."""
        link = ReplicaLink(
            self._fleet, Inbox(self._host), self._chooser, lambda: module_names(self._engine.lora_modules)
        )
        try:
            self._llm = await AsyncLLM.over(self._engine, link, secrets.randbits(CLIENT_INDEX_BITS))
        except EngineError:
            self._has_failed = True
            raise
        return self._llm

    async def update(self, engine: EngineConfig | None, cluster: ClusterConfig | None) -> None:
        """Replace the replicas, some at a time, by ones with these options; None: the same. ConfigError if that cannot
        be: then those that run stay."""
        engine, cluster = engine or self._engine, cluster or self._cluster
        for name in FIXED:
            old, new = getattr(self._engine, name), getattr(engine, name)
            if old != new:
                raise ConfigError(f"{name} = {shown(new)} was {shown(old)}: it cannot change while the server runs")
        if cluster.ray_address != self._cluster.ray_address:
            raise ConfigError(f"ray_address = {shown(cluster.ray_address)} cannot change while the server runs")
        await self._fleet.update(engine, cluster)
        self._engine, self._cluster = engine, cluster

    def close(self) -> None:
        """End the replicas; see `RayFleet.close`. What a Ray that was started here has written goes if all was well."""
        is_clean = self._fleet.close()
        has_lost = self._llm is not None and self._llm.n_engines_lost > 0
        if self._fleet.session and is_clean and not has_lost and not self._has_failed:
            remove_session(self._fleet.session)
