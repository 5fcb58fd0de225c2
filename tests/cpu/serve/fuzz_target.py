"""A process with an HTTP and an HTTPS server over fake engines, for the fuzz.

Its arguments are KEY CERT CERT_KEY FOLDER. It prints both ports, serves until its standard input closes, and logs to
stderr as `quire serve` does, access lines too.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from live_server import LiveServer

from quire.serve.config import ServerConfig
from quire.serve.server import prepare_process


class LastOnly(dict[str, int]):
    """Remembers what was set last."""

    def __setitem__(self, key: str, value: int) -> None:
        self.clear()
        super().__setitem__(key, value)


def forget(engine: Any) -> None:
    """The fake remembers every request, for tests that ask: that is not the server's memory."""
    engine.submitted, engine.cancelled = collections.deque(maxlen=1), collections.deque(maxlen=1)
    engine.tokens_made = LastOnly()


def main(key: str, cert: str, cert_key: str, folder: str) -> None:
    """Serve."""
    prepare_process()
    servers = []
    for name, secure in (("plain", {}), ("secure", {"ssl_certfile": cert, "ssl_keyfile": cert_key})):
        config = ServerConfig(
            port=0,
            api_key=key,
            access_log=True,
            data_dir=str(Path(folder) / name),
            max_file_bytes=4096,
            header_timeout=2,
            body_timeout=2,
            keep_alive_timeout=2,
            write_timeout=2,
            allowed_origins=["https://app.example.com"],
            **secure,
        )
        config.verify()
        servers.append(LiveServer(config).start())
        forget(servers[-1].engine)
    print(*(server.port for server in servers), flush=True)
    sys.stdin.read()
    for server in servers:
        server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
