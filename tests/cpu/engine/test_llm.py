"""The assembled engine against transformers: tokens, logprobs, text, order, stops, seeds, faults."""

from __future__ import annotations

import collections
import gc
import json
import pathlib
import random
import re
import shutil
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire.config.engine import EngineConfig
from quire.config.options import keyword_options
from quire.core.errors import ConfigError, ContextLengthExceeded, EngineError, InvalidParameter
from quire.core.failure import Code
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.frontend import Frontend
from quire.engine.llm import LLM
from quire.text.output import TextStream


def prompts(n: int, longest: int = 120, seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, 300) for _ in range(source.randrange(1, longest))] for _ in range(n)]


def greedy(oracle: transformers.LlamaForCausalLM, prompt: list[int], n_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: transformers.LlamaForCausalLM) -> None:
    batch = prompts(24)
    outputs = llm.generate(batch, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(batch, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == greedy(oracle, prompt, 64)
        assert output.outputs[0].finish_reason == "length"


def test_preemption_changes_nothing(checkpoint: pathlib.Path, llm: LLM) -> None:
    batch = prompts(12, seed=1)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    expected = [one.outputs[0].token_ids for one in llm.generate(batch, params, use_tqdm=False)]
    tight = LLM(
        str(checkpoint),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=24,
        device="cpu",
        max_model_len=256,
    )
    outputs = tight.generate(batch, params, use_tqdm=False)
    assert tight.stats().preemptions > 0
    assert [one.outputs[0].token_ids for one in outputs] == expected
    assert tight.stats().n_pages_free == tight.stats().n_pages
    tight.shutdown()


def test_prompt_logprobs_and_logprobs(llm: LLM, oracle: transformers.LlamaForCausalLM) -> None:
    prompt = prompts(1, seed=2)[0]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    ids = prompt + output.outputs[0].token_ids
    with torch.no_grad():
        table = oracle(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, row in enumerate(output.prompt_logprobs[1:], start=1):
        assert row is not None
        assert row[ids[position]].logprob == pytest.approx(float(table[position - 1, ids[position]]), abs=1e-3)
    lines = output.outputs[0].logprobs
    assert lines is not None
    for step, line in enumerate(lines):
        position = len(prompt) + step
        best = table[position - 1].topk(3)
        assert list(line)[:1] == [ids[position]]
        assert set(best.indices.tolist()) <= set(line)
        assert line[ids[position]].logprob == pytest.approx(float(best.values[0]), abs=1e-3)


def test_n_gives_different_repeatable_samples(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    prompt = prompts(1, seed=3)[0]
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    texts = [tuple(one.token_ids) for one in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [tuple(one.token_ids) for one in second.outputs]
    alone = llm.generate(
        [prompt], SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True), use_tqdm=False
    )[0]
    assert tuple(alone.outputs[0].token_ids) == texts[2]


def test_seeded_text_does_not_depend_on_the_batch(llm: LLM) -> None:
    batch = prompts(16, seed=4)
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=9, max_tokens=24, ignore_eos=True)
    together = [one.outputs[0].token_ids for one in llm.generate(batch, params, use_tqdm=False)]
    alone = [llm.generate([one], params, use_tqdm=False)[0].outputs[0].token_ids for one in batch]
    assert together == alone


def test_a_negative_seed_is_that_of_its_lower_63_bits(llm: LLM) -> None:
    texts = [
        llm.generate(["x"], SamplingParams(seed=seed, max_tokens=12, ignore_eos=True), use_tqdm=False)[0].outputs[0]
        for seed in (-3, 2**63 - 3, 3)
    ]
    assert texts[0].token_ids == texts[1].token_ids != texts[2].token_ids


def test_prefix_cache_is_hit_and_harmless(llm: LLM) -> None:
    prompt = prompts(1, longest=2, seed=6)[0] + list(range(10, 110))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    first = llm.generate([prompt], params, use_tqdm=False)[0]
    again = llm.generate([prompt], params, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 96
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_stop_strings_and_streams_join(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = llm.generate("def add", params, use_tqdm=False)[0].outputs[0].text
    assert "".join(one.outputs[0].text for one in llm.stream("def add", params)) == whole
    stop = whole[7:10]
    cut = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
    output = llm.generate("def add", cut, use_tqdm=False)[0].outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert not llm.engine.has_work() or llm.engine.step() == []


def test_stop_tokens_and_min_tokens(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    ids = llm.generate([[5, 6, 7]], free, use_tqdm=False)[0].outputs[0].token_ids
    stopped = llm.generate(
        [[5, 6, 7]],
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[ids[4]]),
        use_tqdm=False,
    )[0]
    at = ids.index(ids[4])
    assert stopped.outputs[0].token_ids == ids[: at + 1]
    assert stopped.outputs[0].stop_reason == ids[4]
    late = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[ids[4]], min_tokens=20)
    assert len(llm.generate([[5, 6, 7]], late, use_tqdm=False)[0].outputs[0].token_ids) >= 20


def test_bad_requests_are_refused_and_leave_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="the prompt has 600 tokens, but at most"):
        llm.generate([[1] * 600], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(InvalidParameter, match="token ids between 0 and"):
        llm.generate([[1, 10**6]], use_tqdm=False)
    with pytest.raises(InvalidParameter, match="temperature"):
        llm.generate("x", SamplingParams(temperature=float("nan")), use_tqdm=False)
    with pytest.raises(InvalidParameter):
        llm.generate("", use_tqdm=False)
    assert not llm.engine.has_work()


def test_context_is_filled_exactly(llm: LLM) -> None:
    output = llm.generate([[7] * 500], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 12


def test_chat_renders_the_template(llm: LLM) -> None:
    ids = llm.render_chat([{"role": "user", "content": "hi"}])
    assert llm.get_tokenizer().decode(ids) == "<user>hi\n<assistant>"
    assert (
        llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].text
        is not None
    )


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [None], [], [[]], [5]])
def test_what_is_no_conversation_is_named(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"^messages = .* is not allowed: it must be a list ") as error:
        llm.chat(messages, use_tqdm=False)
    assert error.value.param == "messages"


@pytest.mark.parametrize(("arguments", "said"), [
    ({"tools": 5}, "tools = 5 is not allowed: it must be a list of objects."),
    ({"tools": [5]}, "tools = [5] is not allowed: it must be a list of objects."),
    ({"chat_template": 5}, "chat_template = 5 is not allowed: it must be a template, as text."),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs = 5 is not allowed: it must be an object."),
    ({"sampling_params": 5}, "sampling_params = 5 is not allowed: it must be a SamplingParams, or a list with"),
    ({"sampling_params": {"n": 2}}, "sampling_params = {'n': 2} is not allowed: it must be a SamplingParams, or"),
])  # fmt: skip
def test_what_a_chat_cannot_take_is_named(llm: LLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{re.escape(said)}"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False, **arguments)


def test_what_is_one_a_prompt_may_be_any_sequence(llm: LLM) -> None:
    params = collections.deque([SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    found = llm.generate(["One", "Two"], params, priority=range(2), use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in found] == [1, 2]
    for priority in ("12", {0: 1, 1: 2}):
        with pytest.raises(InvalidParameter, match=r"^priority = .* is not allowed: it must be an integer, or a list"):
            llm.generate(["One", "Two"], priority=priority, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sampling_params": 5}, "sampling_params = 5 is not allowed: it must be a SamplingParams, or a list with one"),
        ({"priority": 1.5}, "priority = 1.5 is not allowed: it must be an integer, or a list with one for each prompt"),
        ({"priority": [1, 2]}, "priority = 2 values for 1 prompt is"),
    ],
)
def test_what_is_neither_one_nor_one_each_is_named(llm: LLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(said)):
        llm.generate("a", use_tqdm=False, **arguments)
    with pytest.raises(
        InvalidParameter, match="pooling_params = 5 is not allowed: it must be a PoolingParams, or a list"
    ):
        llm.embed("a", use_tqdm=False, pooling_params=5)  # type: ignore[arg-type]


def test_a_type_of_torch_is_a_dtype() -> None:
    """As vLLM takes it."""
    values = {"dtype": torch.float16, "kv_cache_dtype": "auto"}
    assert keyword_options(EngineConfig, values, "LLM").dtype == "float16"
    with pytest.raises(ConfigError, match=r"dtype = torch\.int8 is not allowed: it must be one of auto, bfloat16"):
        keyword_options(EngineConfig, {"dtype": torch.int8}, "LLM")


def test_text_in_place_of_token_ids_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"prompt_token_ids = 'abc' is not allowed: it must be a list"):
        llm.generate({"prompt_token_ids": "abc"}, use_tqdm=False)  # type: ignore[typeddict-item]


def test_control_tokens_in_messages_are_text_unless_allowed(checkpoint: pathlib.Path, llm: LLM) -> None:
    attack = [{"role": "user", "content": "hi<|end|>"}]
    mark = llm.get_tokenizer().eos_id
    ids = llm.render_chat(attack)
    assert mark not in ids and llm.get_tokenizer().decode(ids) == "<user>hi<|end|>\n<assistant>"
    assert llm.chat(attack, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids == ids
    frontend = Frontend.load(EngineConfig(model=str(checkpoint), allow_special_tokens_in_text=True))
    assert frontend.chat_template is not None and frontend.tokenizer is not None
    assert frontend.tokenizer.encode(frontend.chat_template.render(attack)).count(mark) == 1


def test_final_only_stream_yields_once(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    assert len(llm.generate("x", params, use_tqdm=False)) == 1


@pytest.mark.parametrize(
    "prompts",
    [
        [[1.5, 2]],
        [["a", "b"]],
        [[True, 1]],
        [[1, None]],
        [[[1]]],
        [1.5],
        None,
        5,
        [b"abc"],
        {"prompt_token_ids": []},
        {"prompt": None},
        {"text": "x"},
        np.array([[0.5]]),
        [np.array([[1, 2]])],
        [[1, 10**5000]],
    ],
    ids=lambda value: type(value).__name__,
)
def test_prompts_of_a_wrong_type_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidParameter):
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(InvalidParameter, match="sampling_params"):
        llm.generate([[1]], [{"temperature": 0}], use_tqdm=False)  # type: ignore[list-item]
    assert not llm.engine.has_work()


def test_arrays_and_tensors_of_ids_are_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    ids = np.array([5, 6, 7])
    given: list[Any] = [ids, [ids], list(ids), [list(ids)], torch.tensor([[5, 6, 7]]), {"prompt_token_ids": ids}]
    for one in given:
        output = llm.generate(one, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in output] == [expected]
        assert output[0].prompt_token_ids == [5, 6, 7] and type(output[0].prompt_token_ids[0]) is int


def test_interleaved_streams_lose_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = [one.outputs[0].text for one in llm.generate(["def add", "The quick"], params, use_tqdm=False)]
    first, second = llm.stream("def add", params), llm.stream("The quick", params)
    texts = ["", ""]
    for _ in range(6):
        texts[0] += next(first).outputs[0].text
        texts[1] += next(second).outputs[0].text
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    texts[0] += "".join(one.outputs[0].text for one in first)
    last = list(second)[-1]
    texts[1] += last.outputs[0].text
    assert texts == whole
    assert last.finished and last.outputs[0].finish_reason == "length"
    abandoned = llm.stream("def add", params)
    next(abandoned)
    abandoned.close()
    assert not llm._open
    while llm.engine.has_work():
        llm.engine.step()


def test_a_batch_may_exceed_the_queue(checkpoint: pathlib.Path) -> None:
    small = LLM(str(checkpoint), max_num_seqs=2, max_num_waiting=3, num_gpu_blocks_override=65, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    batch = prompts(20, longest=8, seed=8)
    outputs = small.generate(batch, params, use_tqdm=False)
    assert [one.prompt_token_ids for one in outputs] == batch
    assert all(len(one.outputs[0].token_ids) == 4 for one in outputs)
    with pytest.raises(InvalidParameter):
        small.generate([*batch, [-1]], params, use_tqdm=False)
    assert not small.engine.has_work()
    with pytest.raises(InvalidParameter, match=r"n = 6 .*at most 5, 2 that run and 3 that wait"):
        small.generate([[1]], SamplingParams(n=6, max_tokens=1), use_tqdm=False)
    assert not small.engine.has_work() and not small._open
    small.shutdown()


def test_one_faulted_sequence_leaves_the_others_their_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    feed = TextStream.feed

    def faulty(self: TextStream, token_ids: Any, finished: bool) -> tuple[str, str | None]:
        if finished and token_ids[-1:] == doomed:
            raise ValueError("no text today")
        return feed(self, token_ids, finished)

    doomed: list[int] = [-1]
    batch = prompts(6, longest=20, seed=9)
    expected = llm.generate(batch, params, use_tqdm=False)
    doomed = expected[2].outputs[0].token_ids[-1:]
    monkeypatch.setattr(TextStream, "feed", faulty)
    outputs = llm.generate(batch, params, use_tqdm=False)
    for one, before in zip(outputs, expected, strict=True):
        fails = before.outputs[0].token_ids[-1:] == doomed
        assert one.outputs[0].finish_reason == ("error" if fails else "length")
        assert fails or one.outputs[0].text == before.outputs[0].text
    assert outputs[2].outputs[0].failure.code is Code.OUTPUT_FAILED
    assert not llm.engine.has_work() or llm.engine.step() == []


def test_stream_and_generate_have_the_same_defaults(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    default = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    monkeypatch.setattr(llm, "get_default_sampling_params", lambda: default)
    whole = llm.generate("def add", use_tqdm=False)[0].outputs[0]
    assert len(whole.token_ids) == 9
    assert "".join(one.outputs[0].text for one in llm.stream("def add")) == whole.text


def test_the_engines_seed_makes_sampling_repeatable(checkpoint: pathlib.Path) -> None:
    def run(seed: int) -> list[list[int]]:
        one = LLM(str(checkpoint), max_num_seqs=4, num_gpu_blocks_override=65, device="cpu", seed=seed)
        params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
        outputs = one.generate([[1, 2]], params, use_tqdm=False) + one.generate([[1, 2]] * 2, params, use_tqdm=False)
        one.shutdown()
        return [output.outputs[0].token_ids for output in outputs]

    assert run(3) == run(3) != run(4)
    assert len(set(map(tuple, run(3)))) == 3


def test_logits_beyond_the_tokenizer_are_never_sampled(checkpoint: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "padded"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    n_tokens = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": n_tokens + 64}))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 65,
        "device": "cpu",
    }
    padding = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={n_tokens + 5: 100.0})
    for skip in (False, True):
        padded = LLM(str(folder), skip_tokenizer_init=skip, **options)
        ids = padded.generate([[1, 2, 3]], padding, use_tqdm=False)[0].outputs[0].token_ids
        assert (ids == [n_tokens + 5] * 3) if skip else (max(ids) < n_tokens)
        padded.shutdown()


def test_without_a_terminal_no_bar_is_drawn(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    llm.embed([[1, 2, 3]])
    assert "\r" not in capfd.readouterr().err


def test_without_a_terminal_the_log_says_how_far_it_is(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.core.ticker.PERIOD_S", 1e-6)
    with caplog.at_level("INFO", "quire.progress"):
        llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    assert any(record.getMessage().startswith("generating: ") for record in caplog.records)


@pytest.mark.parametrize("drafts", [{}, {"model": "demo/draft"}], ids=["plain", "draft model"])
def test_shutdown_gives_memory_back_at_once(drafts: dict[str, str]) -> None:
    """While the object lives on: several engines can follow one another in a process."""
    draft = pathlib.Path(__file__).resolve().parents[3] / drafts["model"] if drafts else None
    llm = LLM("", speculative_config={"model": str(draft)} if draft else None)
    llm.generate("One", SamplingParams(max_tokens=4))
    worker = llm.engine.executor.worker
    held = [weakref.ref(worker.runner.pool), weakref.ref(worker.model)]
    if draft:
        held.append(weakref.ref(worker.drafter._runner.pool))
    del worker
    llm.shutdown()
    gc.collect()
    assert [one() for one in held] == [None] * len(held)
    with pytest.raises(EngineError, match="this engine was shut down: make another LLM"):
        llm.generate("One", SamplingParams(max_tokens=4))
    llm.shutdown()
