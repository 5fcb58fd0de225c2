"""A thousand requests in a pool that is too small, half of them cancelled at random moments."""

from __future__ import annotations

import random
from collections import deque

from quire.control.config import SchedulerConfig
from quire.control.scheduler import Scheduler
from quire.control.slot_params import slot_params
from quire.core.clock import VirtualClock
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.executors.digests import null_reference
from quire.engine.executors.null import NullExecutor

VOCAB = 1000


def test_half_are_cancelled_and_the_rest_do_not_notice() -> None:
    rng = random.Random(5)
    config = SchedulerConfig(
        n_pages=200, page_size=8, max_num_seqs=48, max_num_batched_tokens=256, max_model_len=200, pipeline_depth=2
    )
    scheduler = Scheduler(config, VirtualClock())
    device = NullExecutor(
        n_pages=200, page_size=8, max_num_seqs=48, max_model_len=200, vocab_size=VOCAB, clock=VirtualClock()
    )
    requests = {}
    for i in range(1000):
        prompt = [7] * rng.choice([0, 16, 40]) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(n=rng.choice([1, 1, 1, 2]))
        requests[str(i)] = Request(
            request_id=str(i), prompt_token_ids=prompt, params=params, max_tokens=rng.randint(1, 40), seed=i
        )
        scheduler.submit(requests[str(i)])
    doomed = rng.sample(sorted(requests), 500)
    said: dict[tuple[str, int], list[int]] = {}
    in_flight: deque = deque()
    n_turns = 0
    while scheduler.has_work():
        n_turns += 1
        if doomed and rng.random() < 0.7:
            scheduler.cancel(doomed.pop())
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(device.submit(plan))
        if in_flight and (plan is None or len(in_flight) == 2):
            for delta in scheduler.commit(in_flight.popleft().result()):
                said.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    stats = scheduler.stats()
    assert (
        stats.n_pages_free == stats.n_pages and len(scheduler.live.free_slots[0]) == 48 and not scheduler.live.requests
    )
    assert stats.preemptions > 20 and stats.prefix_hits > 1000 and stats.finished["abort"] > 100, "no storm"
    whole = {name for name, tokens in said.items() if len(tokens) == requests[name[0]].max_tokens}
    assert len(whole) == stats.finished["length"]
    for request_id, index in said:
        request = requests[request_id]
        tokens = null_reference(request.prompt_token_ids, slot_params(request, index), request.max_tokens, VOCAB)
        assert said[request_id, index] == tokens[: len(said[request_id, index])]
