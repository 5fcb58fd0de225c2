"""Random requests with drafts on the demo model, some cancelled: pages and slots that are not given back.

    python -m benchmarks.draft_leaks --requests 10000 --method ngram --output leaks.json
"""

from __future__ import annotations

import argparse
import random

from quire.bench.report import build_report, write_report
from quire.config.engine import EngineConfig
from quire.core.commands import Cancel, Submit
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build_engine

AT_ONCE = 14


def request(number: int, rng: random.Random) -> Request:
    """A prompt that repeats itself, shares its beginning with others, and asks for anything."""
    part = [rng.randrange(300, 320) for _ in range(rng.randint(1, 12))]
    prompt = [*range(400, 400 + rng.choice([0, 20, 60])), *part * rng.randint(1, 6)]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.8]), n=rng.choice([1, 1, 1, 3]), top_p=rng.choice([1.0, 0.9]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]), ignore_eos=True,
    )  # fmt: skip
    ends = [rng.randrange(300, 320)] if rng.random() < 0.3 else []
    return Request(
        request_id=f"r{number}", prompt_token_ids=prompt, params=params, max_tokens=rng.randint(1, 40), seed=number,
        end_token_ids=ends,
    )  # fmt: skip


def main() -> None:
    """Prints what is left when all have ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--pages", type=int, default=40)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    config = EngineConfig(
        device="cpu", num_gpu_blocks_override=options.pages, max_model_len=256, max_num_seqs=64,
        max_num_batched_tokens=128, speculative_config={"method": options.method, "num_speculative_tokens": 6},
    )  # fmt: skip
    core, _ = build_engine(config)
    policy, rng = core.scheduler.live.drafts, random.Random(0)
    policy.costs = None  # as many drafts as there is room for
    waiting, live, n_cancels, n_tokens = list(range(options.requests)), dict[str, int](), 0, 0
    while waiting or core.has_work():
        while waiting and len(live) < AT_ONCE:
            one = request(waiting.pop(), rng)
            live[one.request_id] = one.params.n
            core.handle(Submit(one))
        if live and rng.random() < 0.1:
            name = rng.choice(list(live))
            core.handle(Cancel(name))
            del live[name]
            n_cancels += 1
        for delta in core.step():
            n_tokens += len(delta.token_ids)
            if delta.finish_reason is not None and delta.request_id in live:
                live[delta.request_id] -= 1
                if not live[delta.request_id]:
                    del live[delta.request_id]
    stats = core.stats()
    found = {
        "requests": options.requests, "cancels": n_cancels, "preemptions": stats.preemptions, "tokens": n_tokens,
        "drafts_verified": policy.n_verified, "drafts_right": sum(policy.n_right), "prefix_hits": stats.prefix_hits,
        "pages": stats.n_pages, "pages_free_at_the_end": stats.n_pages_free,
    }  # fmt: skip
    core.shutdown()
    for name, value in found.items():
        print(f"{name:24}{value:>12,}")
    if options.output:
        write_report(options.output, build_report("draft_leaks", vars(options), found))


if __name__ == "__main__":
    main()
