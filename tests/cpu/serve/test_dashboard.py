"""examples/grafana-dashboard.json asks for metrics that /metrics has; the page is whole, its libraries as noted."""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from typing import Any

import httpx

from quire.serve.page.assets import FILES, FOLDER

ROOT = pathlib.Path(__file__).resolve().parents[3]
BOARD = ROOT / "examples" / "grafana-dashboard.json"
DECISION = ROOT / "docs" / "decisions" / "0011-web-page-libraries.md"


def test_every_metric_of_the_dashboard_exists(server: Any) -> None:
    body = {"model": "fake", "prompt": [1, 2], "max_tokens": 5}
    assert httpx.post(server.base + "/v1/completions", json=body).status_code == 200
    text = httpx.get(server.base + "/metrics").text
    panels = json.loads(BOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    wanted = {name for expression in expressions for name in re.findall(r"quire:\w+", expression)}
    served = set(re.findall(r"^(quire:\w+)", text, re.M))
    assert len(wanted) > 12 and wanted <= served, wanted - served


def test_a_request_is_counted_in_every_phase(server: Any) -> None:
    def counts() -> dict[str, float]:
        text = httpx.get(server.base + "/metrics").text
        return {
            name: float(value) for name, value in re.findall(r"^quire:(request_\w+)_count{[^}]*} (\S+)", text, re.M)
        }

    before = counts()
    body = {"model": "fake", "prompt": [1, 2], "max_tokens": 5}
    assert httpx.post(server.base + "/v1/completions", json=body).status_code == 200
    after = counts()
    assert {name for name in after if after[name] == before[name] + 1} >= {
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "request_params_n", "request_params_max_tokens",
        "request_prompt_tokens", "request_generation_tokens",
    }  # fmt: skip


def test_every_file_that_the_page_names_is_served() -> None:
    """A module that is imported and not listed in assets.py would leave an empty page."""
    served = {name for name, _ in FILES.values()}
    kinds = {".js", ".mjs", ".css", ".svg", ".woff2"}
    own = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in kinds}
    assert served == own | {"index.html"}
    for name in own - {name for name in own if name.startswith("vendor/")}:
        named = re.findall(r"""(?:from|import\()\s*"\./([^"]+)""", (FOLDER / name).read_text())
        assert set(named) <= served, name
    assert set(re.findall(r'(?:href|src)="page/([^"]+)"', (FOLDER / "index.html").read_text())) <= served


def test_libraries_are_the_ones_that_were_written_down() -> None:
    noted = dict(
        reversed(line.split()) for line in re.findall(r"^    ([0-9a-f]{64}  \S+)$", DECISION.read_text(), re.M)
    )
    found = {path.name: path for path in (FOLDER / "vendor").iterdir() if path.suffix != ".LICENSE"}
    assert noted == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}
    assert {path.name for path in (FOLDER / "vendor").glob("*.LICENSE")} == {
        "marked.LICENSE", "dompurify.LICENSE", "highlight.LICENSE", "temml.LICENSE"
    }  # fmt: skip


def test_the_page_may_load_nothing_from_elsewhere(server: Any) -> None:
    for path in FILES:
        answer = httpx.get(server.base + path)
        rules = dict(rule.strip().partition(" ")[::2] for rule in answer.headers["content-security-policy"].split(";"))
        assert answer.status_code == 200 and answer.content
        assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'" and rules["style-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'" and rules["trusted-types"] == "dompurify"
