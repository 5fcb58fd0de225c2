"""How devices of a mesh are joined: within a host, and between hosts. Owns nothing measured; see `accelerators`."""

from __future__ import annotations

import msgspec


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of host."""

    device_bytes_per_s: float
    """One way, of one device to the others of its host."""
    n_in_host: int = 8
    host_bytes_per_s: float = 50e9
    """One way, of one device to those of other hosts: a 400 Gbit/s adapter each."""
    latency_s: float = 10e-6
    """Of a small collective among two devices; each doubling of ranks adds as much."""
    share: float = 0.45
    """Of the link that collectives of some megabytes reach, as vLLM publishes of four GPUs with NVLink."""

    def bytes_per_s(self, n_devices: int) -> float:
        """Of each of so many devices that lie together."""
        within = n_devices <= self.n_in_host
        return self.share * (self.device_bytes_per_s if within else min(self.device_bytes_per_s, self.host_bytes_per_s))
