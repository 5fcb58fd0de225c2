"""Places of adapters: never more in a step than there are, who waits for one, who passes, and pages that are apart."""

from __future__ import annotations

import random

from test_scheduler_cases import Rig

from quire.control.adapters import PATIENCE_STEPS
from quire.control.cache import salt_of
from quire.core.plan import StepPlan
from quire.core.request import MAX_SALT_CHARS, Request
from quire.core.sampling import SamplingParams

PROMPT = list(range(8))


class Device:
    """What is in each place, and which each slot reads, as plans say."""

    def __init__(self, n_places: int) -> None:
        self.places: list[str] = [""] * n_places
        self.slots: dict[int, str] = {}

    def run(self, plan: StepPlan) -> set[str]:
        """The adapters of a step's sequences."""
        for slot in plan.closed:
            self.slots.pop(slot, None)
        for put in plan.adapters:
            assert put.content_id not in self.places, "it is there"
            assert self.places[put.place] not in self.slots.values(), "a running sequence has it"
            self.places[put.place] = put.content_id
        for opened in plan.opened:
            self.slots[opened.slot] = "" if opened.adapter < 0 else self.places[opened.adapter]
        return {self.slots[slot] for slot in plan.spans.slots} - {""}


def test_a_request_without_place_waits_and_lets_others_pass() -> None:
    rig = Rig(n_adapters=1)
    rig.submit("a", PROMPT, 8, content_id="A")
    rig.submit("b", PROMPT, 2, content_id="B")
    rig.submit("base", PROMPT, 2)
    rig.submit("a2", PROMPT, 2, content_id="A")
    device, order = Device(1), []
    while rig.scheduler.has_work():
        plan = rig.turn()
        order += [len(plan.opened)]
        assert len(device.run(plan)) <= 1
    assert order[0] == 3, "the model's own and the one whose adapter is there go first"
    assert {end.value for end in rig.ends.values()} == {"length"}


def test_nobody_waits_for_ever() -> None:
    """Sequences of one adapter come without end; the one of another gets its turn."""
    rig, device = Rig(n_adapters=1, max_num_waiting=64), Device(1)
    rig.submit("b", PROMPT, 4, content_id="B0")
    step = 0
    while ("other", 0) not in rig.ends:
        if step % 3 == 0:
            rig.submit(f"a{step}", PROMPT, 6, content_id="A")
        if step == 5:
            rig.submit("other", PROMPT, 2, content_id="B")
        device.run(rig.turn())
        step += 1
        assert step < 2 * PATIENCE_STEPS + 40
    assert step > 20, "others have passed it meanwhile"


def test_random_traffic_keeps_the_promises() -> None:
    chance = random.Random(0)
    rig, device = Rig(n_adapters=3, pipeline_depth=1, n_pages=33), Device(3)
    n_loads = 0
    for number in range(300):
        if number < 250:
            which = chance.choice(["", *"ABCDEFG"])
            prompt = [chance.randrange(100) for _ in range(chance.randrange(1, 20))]
            rig.submit(f"r{number}", prompt, chance.randrange(1, 9), content_id=which)
        if number % 11 == 0:
            rig.scheduler.cancel(f"r{chance.randrange(number + 1)}")
        for _ in range(chance.randrange(3)):
            if rig.scheduler.has_work():
                plan = rig.turn()
                assert len(device.run(plan)) <= 3
                n_loads += len(plan.adapters)
    rig.run()
    assert n_loads > 20


def test_salts_of_whatever_is_different_differ() -> None:
    def salt(own: str, content_id: str, apart: bool) -> str:
        params = SamplingParams()
        request = Request(request_id="r", prompt_token_ids=[1], params=params, max_tokens=1, seed=0, cache_salt=own)
        request.content_id = content_id
        return salt_of(request, apart=apart)

    ids = ("", "00ff", "0")
    owns = ("", "0", "00ff", "\1" * MAX_SALT_CHARS, "\0" * MAX_SALT_CHARS, "\1" * 255 + "0", "\1" * 200 + "00ff")
    cases = [(own, content_id, apart) for own in owns for content_id in ids for apart in (False, True)]
    assert len({salt(*case) for case in cases}) == len(cases)


def test_pages_of_another_adapter_are_not_found() -> None:
    rig = Rig(n_adapters=2)
    for name, content_id, hits in (("a", "A", 0), ("b", "B", 0), ("base", "", 0), ("a2", "A", 4), ("again", "", 4)):
        rig.submit(name, PROMPT, 1, content_id=content_id)
        before = rig.scheduler.stats().prefix_hits
        rig.turn()
        assert rig.scheduler.stats().prefix_hits - before == hits, name
