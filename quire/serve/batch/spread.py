"""`quire run-batch --replicas N`: a file of requests answered by several engines, which Ray Data holds.

Owns the files here. The parts of the input (`parts.py`) are read where the engines are, by the same path.
Invariants as in `offline.py`; an engine that is killed is replaced, and its parts are answered anew.
"""

from __future__ import annotations

import os

import msgspec

from quire.config.cluster import ClusterConfig
from quire.config.engine import EngineConfig
from quire.core.files import open_regular
from quire.engine.replicas.ray import RayMap
from quire.serve.batch.offline import BatchSummary, output_file, told_errors
from quire.serve.batch.parts import PartWorker, cut
from quire.serve.config import ServerConfig


def spread_batch(
    engine: EngineConfig, cluster: ClusterConfig, source: str, target: str, concurrency: int
) -> BatchSummary:
    """Answer every line of `source` into `target`, in its order. concurrency: of each engine. Raises as `run_batch`,
    and ConfigError where Ray cannot be used."""
    engine.verify()
    cluster.verify()
    summary = BatchSummary()
    source = os.path.abspath(source)
    with told_errors(source, target):
        with os.fdopen(open_regular(source), "rb") as lines:
            parts = [{"part": msgspec.json.encode(part)} for part in cut(lines, ServerConfig().max_body_bytes)]
        with output_file(target) as output, RayMap(cluster) as ray_map:
            arguments = (msgspec.json.encode(ray_map.engine_config(engine)), source, concurrency)
            for row in ray_map.run(PartWorker, arguments, parts):
                output.write(row["output"])
                output.flush()
                summary.count(row["n_answered"], row["n_failed"], row["first_reason"])
    return summary
