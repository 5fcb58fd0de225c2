"""Start-up on the demo model: `import quire`, `quire serve` to the first healthy answer, and to the first token.

    python -m benchmarks.startup
"""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from quire.bench.report import build_report, write_report

RESULTS = pathlib.Path(__file__).with_name("results")
REPEATS = 5
LIMIT_S = 60.0


def import_s() -> float:
    """Seconds that `import quire` takes in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import quire; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_healthy(base: str) -> bool:
    try:
        return urllib.request.urlopen(f"{base}/health", timeout=1).status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def serve_s() -> tuple[float, float]:
    """Seconds from starting the process to a healthy answer and to the answer of a one-token request."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    start_s = time.perf_counter()
    server = subprocess.Popen([sys.executable, "-m", "quire", "serve", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        while not is_healthy(base):
            if time.perf_counter() - start_s > LIMIT_S:
                raise TimeoutError(f"not healthy after {LIMIT_S} s")
            time.sleep(0.02)
        healthy_s = time.perf_counter() - start_s
        body = json.dumps({"model": "demo", "prompt": "import os", "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{base}/v1/completions", body, headers)).read()
        return healthy_s, time.perf_counter() - start_s
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def main() -> None:
    imports = [import_s() for _ in range(REPEATS)]
    serves = [serve_s() for _ in range(REPEATS)]
    results = {
        "import_s": statistics.median(imports),
        "healthy_s": statistics.median(one for one, _ in serves),
        "healthy_all_s": [one for one, _ in serves],
        "first_token_s": statistics.median(one for _, one in serves),
    }
    print(json.dumps(results))
    write_report(str(RESULTS / "startup.json"), build_report("startup", {}, results))


if __name__ == "__main__":
    main()
