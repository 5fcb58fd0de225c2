"""What an idle engine must have given back, counted from its parts."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch

from quire.control.seq import Seq
from quire.engine.core import EngineCore


def leaks(core: EngineCore, ended: Mapping[str, int], n_generated: int) -> list[str]:
    """What an engine without work still holds or counts wrongly; `ended`: finish reason -> sequences that ended."""
    live, stats = core.scheduler.live, core.stats()
    cache, n_usable = live.cache, core.scheduler.config.n_usable_pages
    nodes = [node for root in cache.tree.roots.values() for node in cache.tree.subtree(root)]
    cached = sorted(page for node in nodes for table in node.tables for page in table if page)
    owned = sorted(page for page, count in enumerate(cache.pool.refs) if count)
    opened = set(core.executor.worker.runner.tail.opened)
    checks = {
        "the engine has work": core.has_work(),
        f"{len(live.requests)} requests": live.requests,
        f"{len(live.running)} running, {len(live.waiting)} waiting": len(live.running) + len(live.waiting),
        f"{stats.steps_in_flight} steps in flight": stats.steps_in_flight,
        "slots": sorted(live.free_slots[0]) != list(range(core.scheduler.config.max_num_seqs)),
        f"locks {[node.lock for node in nodes]}": any(node.lock for node in nodes),
        f"pages {set(owned) ^ set(cached)} have an owner outside the tree or none in it": owned != cached,
        "pages with several owners": any(cache.pool.refs[page] != 1 for page in cached),
        f"{cache.n_available} of {n_usable} pages are available": cache.n_available != n_usable,
        f"gauges: {stats.n_pages_free} free, {stats.n_tokens_held} tokens held, {stats.n_slots_taken} taken": (
            stats.n_pages_free != n_usable or stats.n_tokens_held or stats.n_slots_taken
        ),
        f"finished: counted {stats.finished}, seen {dict(ended)}": stats.finished != dict(ended),
        f"{stats.generation_tokens} tokens counted, {n_generated} delivered": stats.generation_tokens != n_generated,
        f"slots {opened - set(live.closed)} stay open in the runner": opened - set(live.closed),
    }
    return [text for text, bad in checks.items() if bad]


def live_objects(device: str) -> dict[str, int]:
    """Counts that must not grow from one idle moment to another: tensors, sequences, and bytes of tensors on CUDA."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    found = {
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "sequences": kinds.count(Seq),
    }
    if device == "cuda":
        torch.cuda.synchronize()
        found["bytes"] = torch.cuda.memory_allocated()
    return found
