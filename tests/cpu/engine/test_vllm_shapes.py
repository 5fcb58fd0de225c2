"""`LLM` by vLLM's names: options, prompts, priorities, chat, vectors, scores, metrics, and what is refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

import quire
from benchmarks.vllm_document import method_rows, refused_arguments
from quire.cli.model import load_llm
from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.core.beams import BeamSearchParams
from quire.core.errors import ConfigError, InvalidParameter
from quire.core.outputs import Counter, PoolingParams
from quire.core.prompts import TextPrompt, TokensPrompt
from quire.core.sampling import SamplingParams
from quire.engine.args import EngineArgs
from quire.engine.llm import LLM, NOT_HERE, TAKEN_IN_PART

NAMES = json.loads((pathlib.Path(__file__).parents[3] / "benchmarks" / "vllm_names.json").read_text())
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> LLM:
    args = EngineArgs(
        tensor_parallel_size=1, trust_remote_code=True, quantization=None, dtype="float", max_model_len="1k",
        device="cpu", max_num_seqs=2, scheduling_policy="priority", override_generation_config={"temperature": 0.0},
    )  # fmt: skip
    return LLM.from_engine_args(args)


def test_options_are_honoured(demo: LLM) -> None:
    assert (demo.config.dtype, demo.config.max_model_len) == ("float32", 1000)
    assert demo.get_default_sampling_params().temperature == 0.0


@pytest.mark.parametrize("options, message", [
    ({"decode_context_parallel_size": 2}, "divides tokens"),
    ({"max_num_seq": 2}, "LLM has no option 'max_num_seq'; did you mean max_num_seqs"),
    ({"cpu_offload_gb": 4}, "a shorter max_model_len, or device='cpu'"),
    ({"enable_chunked_prefill": False}, ": max_num_batched_tokens of the longest prompt"),
    ({"load_format": "pt"}, "convert the model to safetensors"),
])  # fmt: skip
def test_wrong_options_name_the_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)
    with pytest.raises(ConfigError, match=message.replace("LLM", "EngineArgs")):
        EngineArgs(**options)


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}, {"trust_remote_code": False}])
def test_a_checkpoint_of_ours_with_code_of_its_own_is_loaded(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level("INFO", "quire.engine")
    for file in find_checkpoint("").iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    llm = LLM(str(tmp_path), device="null", **options)
    assert len(llm.generate("x", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 4
    llm.shutdown()
    assert len([line for line in caplog.messages if "auto_map is not followed" in line]) == 1


def test_prompts_of_every_kind(demo: LLM) -> None:
    ids = demo.tokenizer.encode("def f(n):")
    prompts = ["def f(n):", ids, TextPrompt(prompt="def f(n):"), TokensPrompt(prompt_token_ids=ids, cache_salt="own")]
    made = demo.generate(prompts, SHORT, use_tqdm=False)
    assert len({tuple(one.outputs[0].token_ids) for one in made}) == 1
    assert made[3].num_cached_tokens == 0
    with pytest.raises(InvalidParameter, match=r"multi_modal_data = \{'image': 1\} is not.*models are of text alone"):
        demo.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, SHORT)  # type: ignore[list-item]
    with pytest.raises(InvalidParameter, match=r"lora_request = <object .*a LoRARequest"):
        demo.generate("x", SHORT, lora_request=object())  # type: ignore[arg-type]


def test_beams_have_text(demo: LLM) -> None:
    """As vLLM's: tokens and text with the prompt, the best beam first."""
    params = BeamSearchParams(beam_width=2, max_tokens=8, temperature=0.7, length_penalty=0.0)
    (found,) = demo.beam_search("def add(a, b):", params)
    ids = demo.tokenizer.encode("def add(a, b):")
    assert len(found.sequences) == 2
    assert all(one.tokens[: len(ids)] == ids for one in found.sequences)
    assert all(one.text == demo.tokenizer.decode(one.tokens) for one in found.sequences)
    scores = [one.cum_logprob for one in found.sequences]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(InvalidParameter, match="params"):
        demo.beam_search("x", SHORT)  # type: ignore[arg-type]


def test_lower_priorities_run_first(demo: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    made = demo.generate(["a"] * 6, long, use_tqdm=False, priority=[5, 4, 3, 2, 1, 0])
    starts = [one.metrics.first_token_s for one in made]
    assert starts[5] < starts[1] and starts[4] < starts[0]
    with pytest.raises(InvalidParameter, match="priority = 1 value for 2 prompts is not allowed"):
        demo.generate(["a", "b"], SHORT, priority=[1])


def test_a_model_that_is_not_loaded_is_answered_in_the_callers_words() -> None:
    with pytest.raises(ConfigError, match="add device='cpu', or leave quantization out"):
        LLM(device="null", quantization="int4")
    with pytest.raises(ConfigError, match="add --device cpu, or leave --quantization out"):
        load_llm(EngineConfig(device="null", quantization="int4"))


CALLS: dict[str, tuple[Any, ...]] = {
    "generate": ("x",), "chat": ([{"role": "user", "content": "x"}],), "embed": ("x",), "encode": ("x",),
    "score": ("x", "y"),
    "reset_prefix_cache": (), "sleep": (), "wake_up": (),
}  # fmt: skip
"""Methods that refuse some arguments → what they cannot be called without."""


def test_the_page_says_which_arguments_are_refused(demo: LLM) -> None:
    sleepy = LLM(device="null", enable_sleep_mode=True)
    refused = {
        name: {*refused_arguments(name), *(set(parameters) & set(TAKEN_IN_PART))}
        for name, parameters in NAMES["llm"].items()
        if name not in NOT_HERE and name != "__init__"
    }
    assert {name for name, arguments in refused.items() if arguments} == set(CALLS)
    for name, words in CALLS.items():
        method = getattr(sleepy if name in ("sleep", "wake_up") else demo, name)
        for argument in refused[name]:
            with pytest.raises(InvalidParameter, match=argument):
                method(*words, **{argument: ["surprising"]})
        row = next(row for row in method_rows() if row[0] == f"`{name}`")
        assert all(argument in row[2] for argument in refused[name]) and "all arguments" not in row[2]
    sleepy.shutdown()
    assert "tokenization_kwargs" in refused["generate"] and "tags" in refused["wake_up"]


def test_outputs_have_the_rendered_prompt(demo: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    (made,) = demo.chat(messages, SHORT, use_tqdm=False)
    assert made.prompt is not None and "Say hello." in made.prompt
    assert list(made.prompt_token_ids) == demo.render_chat(messages)
    known = TokensPrompt(prompt_token_ids=[5, 6], prompt="as it was")
    assert [one.prompt for one in demo.generate([known, [5, 6]], SHORT, use_tqdm=False)] == ["as it was", None]


def test_chat_takes_a_template_and_its_variables(demo: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ mood }}\n{% endfor %}"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
    output = demo.chat(
        talk, SHORT, use_tqdm=False, chat_template=template, chat_template_kwargs={"mood": "!"},
        add_generation_prompt=False, continue_final_message=True,
    )[0]  # fmt: skip
    expected = demo.tokenizer.encode("user: hi!\nassistant: he", add_special_tokens=False)
    assert output.prompt_token_ids == expected
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        demo.chat(talk, SHORT, chat_template_kwargs={"messages": []})


def test_vectors_by_vllms_shape(demo: LLM) -> None:
    texts = ["def f(n):", "class A:"]
    made = demo.embed(texts, use_tqdm=False)
    for one in made:
        raw = np.array(one.pooled)
        np.testing.assert_allclose(one.outputs.embedding, raw / np.linalg.norm(raw), rtol=1e-12)
        assert one.finished and one.outputs.hidden_size == len(raw)
    cut = demo.embed(texts, use_tqdm=False, pooling_params=PoolingParams(dimensions=8, use_activation=False))
    assert cut[1].outputs.embedding == made[1].pooled[:8]
    data = demo.encode(texts, use_tqdm=False)[0].outputs.data
    torch.testing.assert_close(data, torch.tensor(made[0].outputs.embedding))
    with pytest.raises(InvalidParameter, match="dimensions = 0"):
        demo.embed("a", use_tqdm=False, pooling_params=PoolingParams(dimensions=0))
    with pytest.raises(InvalidParameter, match="pooling_task"):
        demo.encode("a", pooling_task="token_embed")


def test_scores_are_cosines(demo: LLM) -> None:
    texts = ["def f(n):", "class A:", "def g(n):"]
    vectors = np.array([one.outputs.embedding for one in demo.embed(texts, use_tqdm=False)])
    scores = [one.outputs.score for one in demo.score(texts[0], texts, use_tqdm=False)]
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-6)
    paired = [one.outputs.score for one in demo.score(texts, texts[::-1], use_tqdm=False)]
    np.testing.assert_allclose(paired, (vectors * vectors[::-1]).sum(1), atol=1e-6)
    with pytest.raises(InvalidParameter, match="as many as data_2"):
        demo.score(texts[:2], texts, use_tqdm=False)


def test_the_prefix_cache_can_be_reset(demo: LLM) -> None:
    prompt = list(range(1, 200))
    demo.generate([prompt], SHORT, use_tqdm=False)
    assert demo.generate([prompt], SHORT, use_tqdm=False)[0].num_cached_tokens > 100
    assert demo.reset_prefix_cache() and demo.stats().n_pages_cached == 0
    again = demo.stream(prompt, SHORT)
    assert next(again).num_cached_tokens == 0
    assert not demo.reset_prefix_cache()  # the stream holds pages
    assert len(list(again)) > 0 and demo.reset_prefix_cache()
    with pytest.raises(InvalidParameter, match="reset_running_requests"):
        demo.reset_prefix_cache(reset_running_requests=True)


def test_metrics_by_the_names_of_the_server(demo: LLM) -> None:
    before = {one.name: one.value for one in demo.get_metrics()}
    demo.generate("def f(n):", SHORT, use_tqdm=False)
    after = {one.name: one for one in demo.get_metrics()}
    counted = after["quire:generation_tokens"]
    assert isinstance(counted, Counter) and counted.value == before["quire:generation_tokens"] + 4
    assert after["quire:num_requests_running"].value == 0 and demo.get_world_size() == 1


def test_every_method_of_vllms_llm_is_there_or_refused_by_name(demo: LLM) -> None:
    for name in NAMES["llm"]:
        if name in NOT_HERE:
            with pytest.raises(AttributeError, match=f"LLM.{name} is known in vLLM, not in Quire: "):
                getattr(demo, name)
        else:
            assert callable(getattr(demo, name)), name
    assert set(NOT_HERE) <= set(NAMES["llm"])
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        demo.frobnicate()
    assert not hasattr(quire.LLM, "collective_rpc")
