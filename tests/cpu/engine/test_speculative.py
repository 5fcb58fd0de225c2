"""`speculative_config` on the demo model: the same answers in fewer steps, whatever a request asks for."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
from speculative_cases import COPIES, DRAFT, METHODS, TALKS, TREES, WISHES, answers

from quire import LLM, SamplingParams
from quire.compute.forward.eager import EagerForward
from quire.control.draft_policy import DraftPolicy
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.planner.drafts import DraftCosts

pytestmark = pytest.mark.usefixtures("timed_briefly")

SHAPE = DRAFT.parents[1] / "quire" / "bench" / "shapes" / "qwen3-0.6b"


@pytest.fixture(scope="module")
def plain() -> Any:
    llm = LLM("")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def plainly(plain: LLM) -> Any:
    """A wish → its answers without drafts, computed once for all methods."""
    return functools.cache(lambda wish: answers(plain, **WISHES[wish]))


@pytest.fixture(scope="module", params=METHODS | TREES, ids=str)
def speculative(request: pytest.FixtureRequest) -> Any:
    llm = LLM("", speculative_config=(METHODS | TREES)[request.param])
    # As many drafts as there is room for, whatever they cost at the moment on this machine.
    llm.engine.scheduler.live.drafts.costs = None
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("wish", WISHES)
def test_the_answer_is_the_same(plainly: Any, speculative: LLM, wish: str) -> None:
    assert answers(speculative, **WISHES[wish]) == plainly(wish)


def test_text_that_copies_takes_fewer_steps(plain: LLM, speculative: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drafts cost at the moment on this machine."""
    monkeypatch.setattr(speculative.engine.scheduler.live.drafts, "costs", None)
    n_steps = []
    for llm in (plain, speculative):
        before = llm.stats().steps
        llm.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        n_steps.append(llm.stats().steps - before)
    assert n_steps[0] >= 120 and n_steps[1] < n_steps[0] / 2


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_demos_head_is_often_right(method: str) -> None:
    """On questions as the demo is asked them; whatever drafts cost at the moment on this machine."""
    llm = LLM("", speculative_config=METHODS[method])
    llm.engine.scheduler.live.drafts.costs = None
    asked = ["what is 53 * 25?", "write a function that finds the smallest number in a list.", "Who is Ada Adams?"]
    llm.chat([[{"role": "user", "content": one}] for one in asked], SamplingParams(temperature=0.0, max_tokens=80))
    stats = llm.stats()
    llm.shutdown()
    assert stats.n_drafts > 10 and stats.accepted_at[0] > 0.5 * stats.n_drafts


def test_a_rounded_model_has_a_rounded_head() -> None:
    params, said = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), []
    for config in (None, METHODS["eagle3"]):
        llm = LLM("", quantization="int8", speculative_config=config)
        llm.engine.scheduler.live.drafts.costs = None
        said.append([one.outputs[0].token_ids for one in llm.generate([COPIES, TALKS], params)])
        n_right, small = llm.stats().accepted_tokens, llm.engine.executor.worker._small
        llm.shutdown()
    assert said[0] == said[1] and n_right > 20
    assert {linear.product.packed.scheme for linear in small.head.linears} == {"int8"}


@pytest.mark.parametrize(("level", "method"), [(1, "eagle3"), (2, "eagle3"), (2, "mtp")])
def test_a_head_sleeps_and_wakes(plain: LLM, level: int, method: str) -> None:
    """Its keys, and the features that it reads, go with the pages and are made again."""
    llm = LLM("", enable_sleep_mode=True, speculative_config=METHODS[method])
    llm.engine.scheduler.live.drafts.costs = None
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    n_right = []
    for _ in range(2):
        before = llm.stats().accepted_tokens
        assert (
            llm.generate(COPIES, params)[0].outputs[0].token_ids
            == plain.generate(COPIES, params)[0].outputs[0].token_ids
        )
        n_right.append(llm.stats().accepted_tokens - before)
        llm.sleep(level)
        llm.wake_up()
    llm.shutdown()
    assert n_right[0] == n_right[1] > 0


def test_time_saved_is_what_plain_steps_take_for_the_tokens_of_right_drafts() -> None:
    """Were a step a second long, each right draft would save one."""
    llm = LLM("", speculative_config={"method": "ngram"})
    llm.engine.scheduler.live.drafts = DraftPolicy(8, DraftCosts((1, 2), (1.0, 1.0), guess_s=0.0))
    llm.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    stats = llm.stats()
    llm.shutdown()
    assert stats.accepted_tokens > 20
    assert 0.9 * stats.accepted_tokens < stats.draft_saved_s < 1.1 * (stats.accepted_tokens + stats.n_drafts)


def test_metrics_under_the_known_names(plain: LLM, speculative: LLM) -> None:
    speculative.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    stats = speculative.stats()
    assert 0 < stats.n_drafts <= stats.draft_tokens and sum(stats.accepted_at) <= stats.draft_tokens
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True), "a draft counts if those before it do"
    values = {metric.name: metric for metric in speculative.get_metrics()}
    assert values["quire:spec_decode_num_accepted_tokens"].value == sum(stats.accepted_at)
    assert not any("spec_decode" in metric.name for metric in plain.get_metrics())


def test_what_drafts_did_for_one_request(speculative: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are the engine's; a right draft behind the end of the output is not kept."""
    history = speculative.engine.scheduler.history
    real, labels = history.arrive, [f"drafts{i}" for i in range(9)]

    def arrive(request: Request, n_waiting: int) -> None:
        request.label = f"{labels[0]}-0"
        real(request, n_waiting)

    monkeypatch.setattr(history, "arrive", arrive)
    monkeypatch.setattr(speculative.engine.scheduler.live.drafts, "costs", None)  # as many drafts as there may be
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    n_dropped: list[int] = []
    while len(labels) > 1:
        before = speculative.stats()
        parts = [part.outputs[0].token_ids for part in speculative.stream(COPIES[0], params)]  # of a step each
        after, [found] = speculative.stats(), history.explain(labels.pop(0))
        assert found.n_drafts == after.n_drafts - before.n_drafts
        assert found.draft_tokens == after.draft_tokens - before.draft_tokens >= found.drafts_kept
        tokens = [token for part in parts for token in part]
        assert found.n_outputs == len(tokens) == sum(map(bool, parts)) + found.drafts_kept
        n_dropped.append(after.accepted_tokens - before.accepted_tokens - found.drafts_kept)
        if not params.stop_token_ids:
            assert found.n_drafts > 0 and found.drafts_kept > 10
            stops = [token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i]]
        params.stop_token_ids = [stops.pop()]
    assert n_dropped[0] == 0 and min(n_dropped) >= 0, "without a stop all right drafts are kept"


def test_the_prefix_cache_is_hit_as_often(plain: LLM, speculative: LLM) -> None:
    hits = []
    for llm in (plain, speculative):
        llm.reset_prefix_cache()  # other tests have the same prompts
        before = llm.stats().prefix_hits
        first = llm.generate(COPIES + "x = 1\n", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        again = list(first[0].prompt_token_ids) + list(first[0].outputs[0].token_ids)
        llm.generate([{"prompt_token_ids": again}], SamplingParams(temperature=0.0, max_tokens=8))
        hits.append(llm.stats().prefix_hits - before)
    assert hits[0] == hits[1] > 0


DEMO = DRAFT.parents[1] / "quire" / "_models" / "demo"


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"n_pages": 28}], ids=str)
def test_a_model_that_guesses_for_itself_is_always_right(options: dict[str, int]) -> None:
    """Then its keys are where they should be: after prompts in parts, shared prefixes, forks, preemption and steps
    without drafts."""
    n_pages = options.pop("n_pages", 0)
    llm = LLM(
        "", dtype="float32", num_gpu_blocks_override=n_pages, speculative_config={"model": str(DEMO)},
        max_model_len=384, **options,
    )  # fmt: skip
    drafts, rng = llm.engine.scheduler.live.drafts, random.Random(0)
    drafts.costs = None

    def few(seqs: list[Any], n_rows: int, n_free: int, step: int) -> list[int]:
        return [rng.choice([0, 0, 1, min(4, n_free // len(seqs))]) if i < n_free else 0 for i in range(len(seqs))]

    as_many = drafts.choose
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, n=2)
    for number in range(2):
        llm.generate([COPIES + "x = 1\n" * number, TALKS, COPIES[:90]], params)
        drafts.choose = few  # some steps with few drafts, or none
        llm.generate([COPIES + "y = 1\n" * number, TALKS + "?"], params)
        drafts.choose = as_many
    stats = llm.stats()
    llm.shutdown()
    assert stats.draft_tokens > 100 and stats.accepted_tokens == stats.draft_tokens
    assert stats.prefix_hits > 0 and (stats.preemptions > 0) == (n_pages > 0)


@pytest.mark.parametrize("seed", [1, 2])
def test_after_wrong_drafts_it_reads_on_where_they_began(seed: int) -> None:
    """A model that guesses its best token for itself is right where the chosen one is that, and nowhere else; also
    after steps without drafts."""
    params = SamplingParams(temperature=0.9, seed=seed, max_tokens=150, ignore_eos=True, logprobs=1)
    plain, llm = (LLM("", dtype="float32", speculative_config=config) for config in (None, {"model": str(DEMO)}))
    policy, rng = llm.engine.scheduler.live.drafts, random.Random(seed)
    policy.choose = lambda seqs, n_rows, n_free, step: [rng.choice([0, 0, 2, 4])] * len(seqs)
    seen: list[tuple[int, int, int]] = []
    policy.count = lambda seq, step, n_asked, n, n_right, n_rows, **_: seen.append((seq.n_outputs, n, n_right))
    one = plain.generate(TALKS, params)[0].outputs[0]
    is_best = [row[token].rank == 1 for row, token in zip(one.logprobs, one.token_ids, strict=True)]
    assert llm.generate(TALKS, params)[0].outputs[0].token_ids == one.token_ids
    assert len(seen) > 20 and len({n_right for *_, n_right in seen}) > 2
    for at, n, n_right in seen:
        assert n_right == len(list(itertools.takewhile(bool, is_best[at : at + n])))
    plain.shutdown()
    llm.shutdown()


def test_one_slot_verifies_all_drafts_in_one_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step chooses more tokens than there are sequences; the slow way is not taken for that."""
    llm = LLM("", max_num_seqs=1, speculative_config={"method": "ngram", "num_speculative_tokens": 12})
    llm.engine.scheduler.live.drafts.costs = None
    steps = []
    real = EagerForward.run
    monkeypatch.setattr(EagerForward, "run", lambda self, step: steps.append(step) or real(self, step))
    llm.generate(COPIES, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    stats = llm.stats()
    llm.shutdown()
    assert stats.accepted_at[11] > 0, "twelve drafts were right at once"
    assert not steps


def test_a_draft_model_must_fit() -> None:
    with pytest.raises(ConfigError, match="has 4096 token ids and the model has 151936: give one"):
        LLM(
            str(SHAPE), load_format="dummy", skip_tokenizer_init=True, max_model_len=64,
            speculative_config={"model": str(DRAFT)},
        )  # fmt: skip


def test_another_device_refuses() -> None:
    with pytest.raises(ConfigError, match="needs a model and the device is null"):
        LLM("", device="null", speculative_config={"method": "ngram"})
