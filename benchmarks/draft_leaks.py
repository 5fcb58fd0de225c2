"""Random requests with drafts on the demo model, some cancelled: pages, slots and matchers that are not given back.

    python -m benchmarks.draft_leaks --requests 10000 --speculative-config '{"method": "ngram"}' --output leaks.json
    python -m benchmarks.draft_leaks --requests 2000 --output leaks.json

Without a configuration: every drafter in turn, chains and trees, a head and a draft model from `demo/`. Ends with an
error where something is left.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import sys
from typing import Any, Final

from quire.bench.report import build_report, write_report
from quire.config.engine import EngineConfig
from quire.core.commands import Cancel, Submit
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.structured import StructuredOutputsParams
from quire.engine.build import build_engine

AT_ONCE = 14
GRAMMAR: Final = StructuredOutputsParams(regex="[a-d]{3,30}")
"""Of every tenth request."""
DEMO: Final = pathlib.Path(__file__).resolve().parents[1] / "demo"
SUFFIX: Final = {"method": "suffix", "num_speculative_tokens": 6}
HEAD: Final = {"method": "eagle3", "model": str(DEMO / "head")}
MODULE: Final = {"method": "mtp", "model": str(DEMO / "mtp")}
DRAFTERS: Final[dict[str, dict[str, Any]]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 6},
    "suffix": SUFFIX,
    "suffix tree": SUFFIX | {"branching": 3},
    "draft_model": {"model": str(DEMO / "draft"), "num_speculative_tokens": 4},
    "eagle3": HEAD | {"num_speculative_tokens": 4},
    "eagle3 tree": HEAD | {"num_speculative_tokens": 6, "branching": 2},
    "mtp": MODULE | {"num_speculative_tokens": 4},
    "mtp fixed tree": MODULE | {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"},
}


def request(number: int, rng: random.Random) -> Request:
    """A prompt that repeats itself, shares its beginning with others, and asks for anything."""
    part = [rng.randrange(300, 320) for _ in range(rng.randint(1, 12))]
    prompt = [*range(400, 400 + rng.choice([0, 20, 60])), *part * rng.randint(1, 6)]
    grammar = GRAMMAR if rng.random() < 0.1 else None
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.8]), n=rng.choice([1, 1, 1, 3]), top_p=rng.choice([1.0, 0.9]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]), ignore_eos=grammar is None,
        structured_outputs=grammar,
    )  # fmt: skip
    ends = [rng.randrange(300, 320)] if rng.random() < 0.3 else []
    return Request(
        request_id=f"r{number}", prompt_token_ids=prompt, params=params, max_tokens=rng.randint(1, 40), seed=number,
        end_token_ids=ends,
    )  # fmt: skip


def run(speculative: dict[str, Any], n_requests: int, n_pages: int) -> dict[str, Any]:
    """What was done, and what is left when all have ended."""
    config = EngineConfig(
        device="cpu", num_gpu_blocks_override=n_pages, max_model_len=256, max_num_seqs=64, max_num_batched_tokens=128,
        speculative_config=speculative,
    )  # fmt: skip
    core, _ = build_engine(config)
    policy, rng = core.scheduler.live.drafts, random.Random(0)
    policy.costs = None  # as many drafts as there is room for
    waiting, live, n_cancels, n_tokens = list(range(n_requests)), dict[str, int](), 0, 0
    while waiting or core.has_work():
        while waiting and len(live) < AT_ONCE:
            one = request(waiting.pop(), rng)
            live[one.request_id] = one.params.n
            core.handle(Submit(one))
        if live and rng.random() < 0.1:
            name = rng.choice(list(live))
            core.handle(Cancel([name]))
            del live[name]
            n_cancels += 1
        for delta in core.step():
            n_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and delta.request_id in live:
                live[delta.request_id] -= 1
                if not live[delta.request_id]:
                    del live[delta.request_id]
    stats, n_slots = core.stats(), config.max_num_seqs
    found = {
        "requests": n_requests, "cancels": n_cancels, "preemptions": stats.preemptions, "tokens": n_tokens,
        "drafts_verified": policy.n_verified, "drafts_right": sum(policy.n_right), "prefix_hits": stats.prefix_hits,
        "pages": stats.n_pages, "pages_free_at_the_end": stats.n_pages_free,
        "slots": n_slots, "slots_free_at_the_end": sum(map(len, core.scheduler.live.free_slots)),
        "matchers_at_the_end": core.grammars.n_live, "errors": stats.finished["error"],
    }  # fmt: skip
    core.shutdown()
    return found


def leaked(found: dict[str, Any]) -> bool:
    """Whether something was not given back. An error counts, too: behind a step that failed all pages are new."""
    names = [("pages", "pages_free_at_the_end"), ("slots", "slots_free_at_the_end")]
    is_left = any(found[all_of] != found[free] for all_of, free in names)
    return is_left or found["matchers_at_the_end"] > 0 or found["errors"] > 0


def main() -> None:
    """Prints what is left when all have ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="of each drafter")
    parser.add_argument("--speculative-config", type=json.loads, help="a JSON object; left out: every drafter")
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    given = options.speculative_config
    drafters = DRAFTERS if given is None else {given.get("method", "draft_model"): given}
    rows = {}
    for name, speculative in drafters.items():
        rows[name] = run(speculative, options.requests, options.pages)
        print(name, *(f"{key} {value:,}" for key, value in rows[name].items()), sep="\n    ", flush=True)
    if options.output:
        write_report(options.output, build_report("draft_leaks", vars(options), rows))
    if lost := [name for name, found in rows.items() if leaked(found)]:
        sys.exit(f"not all was given back: {', '.join(lost)}")


if __name__ == "__main__":
    main()
