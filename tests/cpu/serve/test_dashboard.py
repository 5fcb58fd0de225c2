"""examples/grafana-dashboard.json asks for metrics that /metrics has."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import httpx

BOARD = pathlib.Path(__file__).resolve().parents[3] / "examples" / "grafana-dashboard.json"


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
