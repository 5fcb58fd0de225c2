"""openai-python against the live server, and the exact shapes of answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from serve_fakes import ASSISTANT, END, USER, reply_to

from quire.core.beams import BeamTerms
from quire.core.logprobs import LogprobRows, PackedLogprobs, TokenLogprobs
from quire.serve.openai.logprobs import TokenNames, chat_logprobs

PROMPT = "Once upon a time"


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0)


def ids(server: Any, text: str) -> list[int]:
    return server.llm.tokenizer.encode(text)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "fake-alias"]
    assert client.models.retrieve("fake-alias").owned_by == "quire"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(server: Any, client: openai.OpenAI) -> None:
    server.engine.cached_tokens = 8
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}], max_tokens=12)
    prompt = [USER, *ids(server, "user:Hi\n"), ASSISTANT]
    assert server.engine.submitted[-1].prompt_token_ids == prompt
    assert answer.choices[0].message.content == reply_to(prompt)[:12]
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == "fake" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.total_tokens == len(prompt) + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 8


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_chat_is_the_same_text(server: Any, client: openai.OpenAI, n: int) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="fake", messages=messages, max_tokens=20, n=n)
    stream = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=20, n=n, stream=True, stream_options={"include_usage": True}
    )
    texts, roles, reasons = [""] * n, [0] * n, [""] * n
    usage = []
    for chunk in stream:
        if chunk.usage is not None:
            usage.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            assert not reasons[choice.index], "nothing may follow a finish reason"
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [1] * n and reasons == ["length"] * n
    assert len(usage) == 1 and usage[0] == whole.usage


async def test_async_client(server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0) as client:
        stream = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=9, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == reply_to(ids(server, PROMPT))[:9]


def test_chat_logprobs(server: Any, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    whole = client.chat.completions.create(model="fake", messages=messages, max_tokens=6, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == whole.choices[0].message.content
    for token in logprobs.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert [top.logprob for top in token.top_logprobs] == [-0.25, -1.5]
        assert token.token in {top.token for top in token.top_logprobs}
    stream = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [
        token
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content or []
    ]
    assert streamed == logprobs.content


def test_level_tokens_come_in_the_order_of_their_ids() -> None:
    """Whichever of them was chosen, and also where the chosen one is beyond the last place."""
    for chosen in (3, 5, 7):
        rows = LogprobRows(lambda token: None)
        rows.add(PackedLogprobs.of([TokenLogprobs(-1.0, 1, [3, 5], [-1.0, -1.0])]), [chosen])
        entry = json.loads(chat_logprobs(rows, 2, TokenNames(None, True)))["content"][0]
        assert entry["token"] == f"token_id:{chosen}"
        assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:3", "token_id:5"]


def test_top_logprobs_zero_names_only_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, logprobs=True
    )
    assert answer.choices[0].logprobs is not None
    assert [token.top_logprobs for token in answer.choices[0].logprobs.content or []] == [[], [], []]


@pytest.mark.parametrize(
    "prompt", [PROMPT, [PROMPT, "Two"], [71, 72, 73], [[71, 72], [73, 74, 75]]], ids=["text", "texts", "ids", "lists"]
)
def test_forms_of_prompt(server: Any, client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, max_tokens=10, n=2)
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        prompt = [prompt]
    expected = [each if isinstance(each, list) else ids(server, each) for each in prompt]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert [choice.text for choice in answer.choices] == [reply_to(each, i)[:10] for each in expected for i in range(2)]
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, expected))
    assert answer.usage.completion_tokens == 20 * len(expected)
    streamed = [""] * len(answer.choices)
    for chunk in client.completions.create(model="fake", prompt=prompt, max_tokens=10, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_gives_prompt_log_likelihoods(server: Any, client: openai.OpenAI, max_tokens: int) -> None:
    """What lm-eval's `local-completions` asks for: token_logprobs[ctx:-1] are the prompt's own."""
    tokens = ids(server, "abcd")
    answer = client.completions.create(
        model="fake", prompt=[tokens], max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, seed=1234
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.text == "abcd" + reply_to(tokens, seed=1234)[:max_tokens]
    assert choice.logprobs.tokens == list("abcd") + list(reply_to(tokens, seed=1234)[:max_tokens])
    values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert values is not None and tops is not None
    assert values[0] is None and tops[0] is None
    assert values[1:4] == [-0.25 if token % 2 == 0 else -1.5 for token in tokens[1:]]
    for value, top in zip(values[1:], tops[1:], strict=True):
        assert (value == max(top.values())) == (value == -0.25)
        assert value in top.values()
    assert choice.logprobs.text_offset == list(range(4 + max_tokens))
    assert answer.usage is not None and answer.usage.completion_tokens == max_tokens


def test_streamed_echo_with_logprobs(server: Any, client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "fake", "prompt": ["ab", "cde"], "max_tokens": 4, "echo": True, "logprobs": 2}
    whole = client.completions.create(**arguments)
    pieces: list[dict[str, list[Any]]] = [{}, {}]
    texts = ["", ""]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                pieces[choice.index].setdefault(name, []).extend(values)
    assert texts == [choice.text for choice in whole.choices]
    assert pieces == [choice.logprobs.model_dump() for choice in whole.choices if choice.logprobs]


def test_prompt_logprobs(server: Any) -> None:
    with server.client() as http:
        answer = http.post(
            "/v1/completions", json={"model": "fake", "prompt": "abc", "max_tokens": 1, "prompt_logprobs": 1}
        ).json()
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    token = str(server.llm.tokenizer.encode("b")[0])
    assert first is None and set(second[token]) == {"logprob", "rank", "decoded_token"}
    assert second[token]["decoded_token"] == "b" and third is not None


def test_stop_string_and_end_token(server: Any, client: openai.OpenAI) -> None:
    server.engine.text = "one two three"
    answer = client.completions.create(model="fake", prompt="x", max_tokens=50, stop=["two"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.choices[0].model_extra == {"stop_reason": "two"}
    answer = client.completions.create(model="fake", prompt="x", max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two three", "stop")
    stream = client.completions.create(model="fake", prompt="x", max_tokens=50, stop="thr", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one two "


def test_text_beyond_ascii_survives_streaming(server: Any, client: openai.OpenAI) -> None:
    server.engine.text = 'naïve — 漢字 🙂 "quoted" \\ \n\t\u2028end'
    stream = client.completions.create(model="fake", prompt="x", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == server.engine.text


def test_seed_is_honoured_and_negative_ones_are_folded(server: Any, client: openai.OpenAI) -> None:
    for seed, folded in ((7, 7), (-1, 2**63 - 1), (-(2**63), 0)):
        client.completions.create(model="fake", prompt="x", max_tokens=1, seed=seed)
        assert server.engine.submitted[-1].seed == folded


def test_every_sampling_field_reaches_the_engine(make_server: Any) -> None:
    server = make_server(engine_options={"scheduling_policy": "priority"})
    fields = {
        "n": 2, "temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.2, "seed": 5, "stop": ["zz"], "stop_token_ids": [3],
        "bad_words": ["bad"], "allowed_token_ids": [1, 2, 3], "logit_bias": {"5": -2.5}, "min_tokens": 2,
        "max_tokens": 5, "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    others = {"priority": -3, "cache_salt": "tenant", "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"}
    with server.client() as http:
        for path, prompt in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = http.post(path, json={"model": "fake", **prompt, **fields, **others})
            assert answer.status_code == 200, answer.text
            request = server.engine.submitted[-1]
            given = {name: getattr(request.params, name) for name in fields if name != "logit_bias"}
            assert given == {name: value for name, value in fields.items() if name != "logit_bias"}
            assert request.params.logit_bias == {5: -2.5}
            assert (request.priority, request.cache_salt, request.end_token_ids) == (-3, "tenant", [])


def test_max_completion_tokens(server: Any, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    answer = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=3)
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=3, max_tokens=3)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=3, max_tokens=4)
    assert caught.value.param == "max_completion_tokens"


def test_tools_reach_the_template_unless_choice_is_none(server: Any, client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages: list[Any] = [{"role": "user", "content": "x"}]
    client.chat.completions.create(model="fake", messages=messages, tools=tools, max_tokens=1)
    with_tools = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    client.chat.completions.create(model="fake", messages=messages, tools=tools, tool_choice="none", max_tokens=1)
    without = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert "tools:add," in with_tools and "tools:" not in without


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}
    ]
    first = client.chat.completions.create(model="fake", messages=messages, max_tokens=2)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="fake", messages=messages, max_tokens=2).choices


def test_continue_final_message(server: Any) -> None:
    body = {
        "model": "fake", "max_tokens": 1, "add_generation_prompt": False, "continue_final_message": True,
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}],
    }  # fmt: skip
    with server.client() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    prompt = server.llm.tokenizer.decode(server.engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>assistant:Well, ")


def test_errors_have_the_sdks_classes(server: Any, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=messages, temperature=3000)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=messages)
    assert missing.value.code == "model_not_found"
    with server.client() as http:
        bodies = {
            "chat/completions": {"messages": messages},
            "completions": {"prompt": "x"},
            "embeddings": {"input": "x"},
        }
        for path, body in bodies.items():
            error = http.post(f"/v1/{path}", json=body).json()["error"]
            assert (error["param"], error["code"]) == ("model", "missing_required_parameter")
            assert error["message"] == "model is missing. This server has: fake, fake-alias."
    server.engine.fault = lambda request: True
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="fake", messages=messages, max_tokens=9)
    stream = client.chat.completions.create(model="fake", messages=messages, max_tokens=9, stream=True)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "sequence_fault"


def test_streams_end_with_done_and_have_whole_frames(server: Any) -> None:
    with server.client() as http:
        answer = http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 4, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    for frame in frames[:-2]:
        assert frame.startswith("data: ") and json.loads(frame[6:])["object"] == "text_completion"


def test_tokenize_and_detokenize(server: Any) -> None:
    with server.client() as http:
        answer = http.post("/tokenize", json={"prompt": "hé<|end|>", "return_token_strs": True}).json()
        tokens = server.llm.tokenizer.encode("hé<|end|>")
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (tokens, 4, 4096)
        assert answer["token_strs"][0] == "h" and answer["token_strs"][-1] == "<|end|>"
        assert http.post("/detokenize", json={"tokens": tokens, "model": "fake"}).json() == {"prompt": "hé<|end|>"}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert chat["tokens"] == [USER, *server.llm.tokenizer.encode("user:Hi\n"), ASSISTANT]
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
        assert http.post("/tokenize", json={}).status_code == 400


def test_metrics(server: Any) -> None:
    with server.client() as http:
        http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 4})
        http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 4, "stream": True})
        http.request("BREW", "/nothing/1234")
        text = http.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_sum", "e2e_request_latency_seconds_count",
    ):  # fmt: skip
        assert f'quire:{name}{{model_name="fake"}}' in values, name
    for reason in ("stop", "length", "abort", "error"):
        assert f'quire:request_success_total{{finished_reason="{reason}",model_name="fake"}}' in values
    assert values['quire:e2e_request_latency_seconds_count{model_name="fake"}'] >= 2
    assert values['quire:inter_token_latency_seconds_count{model_name="fake"}'] >= 3
    assert "1234" not in text


def test_engine_view(server: Any) -> None:
    with server.client() as http:
        http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 1})
        answer = http.get("/v1/engine").json()
    assert answer["healthy"] is True and answer["engine"]["page_size"] == 16
    assert isinstance(answer["stats"]["page_map"], str) and answer["stats"]["n_pages"] == 64


def test_ids(server: Any) -> None:
    with server.client() as http:
        first = http.get("/version", headers={"x-request-id": "job-17"})
        second = http.get("/version", headers={"x-request-id": 'bad"\x7f id'})
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["x-client-request-id"] == "job-17"
    assert "x-client-request-id" not in second.headers


def test_chat_template_kwargs_need_the_operators_leave(make_server: Any, server: Any) -> None:
    body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    open_server, closed_server = server, make_server(enable_chat_template_kwargs=False)
    with closed_server.client() as closed, open_server.client() as http:
        refused = closed.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"mood": "calm"}})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
        assert (
            http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"mood": "calm"}}).status_code
            == 200
        )
        prompt = open_server.llm.tokenizer.decode(open_server.engine.submitted[-1].prompt_token_ids)
        assert "[calm]" in prompt
        for bad in ({"messages": []}, {"tokenize": True}, {"mood": {"a": 1}}, {"mood": "x" * 999}):
            answer = http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": bad})
            assert answer.status_code == 400, bad
        answer = http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"__class__": "x", "b": [1]}})
        assert answer.headers["x-ignored-params"] == "chat_template_kwargs.__class__, chat_template_kwargs.b"


def test_explicit_nulls_mean_absent(server: Any) -> None:
    from quire.serve.openai.schema import ChatRequest, CompletionRequest

    for path, kind, prompt in (
        ("/v1/completions", CompletionRequest, {"prompt": "x"}),
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        nulls = {name: None for name in kind.__struct_fields__ if name not in {"model", *prompt}}
        with server.client() as http:
            answer = http.post(path, json={**nulls, "model": "fake", "max_tokens": 1, **prompt})
        assert answer.status_code == 200, answer.text
        assert isinstance(answer, httpx.Response)
        assert server.engine.submitted[-1].end_token_ids == [END]


def test_the_checkpoints_defaults_hold_where_a_request_says_nothing(make_server: Any) -> None:
    server = make_server(engine_options={"defaults": {"temperature": 0.0, "top_k": 20}})
    with server.client() as http:
        assert http.get("/v1/engine").json()["default_sampling"] == {"temperature": 0.0, "top_k": 20}
        for fields, temperature in (({}, 0.0), ({"temperature": None}, 0.0), ({"temperature": 0.5}, 0.5)):
            answer = http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 1, **fields})
            assert answer.status_code == 200
            params = server.engine.submitted[-1].params
            assert (params.temperature, params.top_k, params.top_p) == (temperature, 20, 1.0)


def test_token_ids_are_shown_when_asked_for(server: Any) -> None:
    body = {"model": "fake", "prompt": ids(server, PROMPT), "max_tokens": 7}
    expected = ids(server, reply_to(body["prompt"]))[:7]
    with server.client() as http:
        plain, whole = (
            http.post("/v1/completions", json=body | more).json() for more in ({}, {"return_token_ids": True})
        )
        streamed = http.post("/v1/completions", json=body | {"return_token_ids": True, "stream": True}).text
    assert "token_ids" not in plain["choices"][0] and whole["choices"][0]["token_ids"] == expected
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == expected


def test_best_of(server: Any, client: openai.OpenAI) -> None:
    """The fake's completions differ in their means by the share of even bytes; the best ones come, best first."""
    all_of_them = client.completions.create(model="fake", prompt=PROMPT, max_tokens=20, n=6, logprobs=0)
    means = [sum(choice.logprobs.token_logprobs) / 20 for choice in all_of_them.choices]  # type: ignore[union-attr]
    ranked = sorted(range(6), key=lambda index: -means[index])
    answer = client.completions.create(model="fake", prompt=PROMPT, max_tokens=20, n=2, best_of=6)
    assert [choice.text for choice in answer.choices] == [all_of_them.choices[index].text for index in ranked[:2]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage is not None and answer.usage.completion_tokens == 120
    echoed = client.completions.create(model="fake", prompt=PROMPT, max_tokens=20, best_of=6, echo=True, logprobs=0)
    assert echoed.choices[0].text == PROMPT + answer.choices[0].text
    assert len(echoed.choices[0].logprobs.token_logprobs) == len(PROMPT) + 20  # type: ignore[union-attr]
    same = client.completions.create(model="fake", prompt=PROMPT, max_tokens=20, n=2, best_of=2)
    assert [choice.text for choice in same.choices] == [choice.text for choice in all_of_them.choices[:2]]


def test_what_a_beam_search_is_asked(server: Any) -> None:
    """The engine hears of width and penalty; what only sampling has is named as ignored, the rest is refused."""
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 4, "use_beam_search": True}
    with server.client() as http:
        more = {"n": 2, "best_of": 5, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0.7, "seed": 3}
        answer = http.post("/v1/completions", json=body | more)
        assert answer.status_code == 200 and answer.headers["x-ignored-params"] == "temperature, seed"
        request = server.engine.submitted[-1]
        assert request.beams == BeamTerms(5, 0.5, "never") and request.params.n == 2
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 3}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert server.engine.submitted[-1].beams == BeamTerms(3)
        for more, param in (
            ({"n": 65}, "n"), ({"best_of": 65}, "best_of"), ({"stop": "x"}, "stop"), ({"min_tokens": 2}, "min_tokens"),
            ({"logit_bias": {"5": 1.0}}, "logit_bias"), ({"presence_penalty": 1.0}, "presence_penalty"),
            ({"early_stopping": "soon"}, "early_stopping"), ({"length_penalty": 1e9}, "length_penalty"),
            ({"n": 3, "beam_width": 3}, "beam_width"), ({"guided_regex": "a+"}, "guided_regex"),
        ):  # fmt: skip
            refused = http.post("/v1/completions", json=body | more)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        refused = http.post("/v1/completions", json=body | {"beam_width": 1})
        assert "n is the width" in refused.json()["error"]["message"]


def test_load(server: Any) -> None:
    server.engine.held = True
    with server.client() as http:
        first = http.get("/v1/load").json()
        assert first["healthy"] and first["num_requests_running"] == first["num_requests_waiting"] == 0
        assert first["kv_pages_total"] == first["kv_pages_free"] == 64 or first["kv_pages_total"] == 0
        server.engine.held = False
        http.post("/v1/completions", json={"model": "fake", "prompt": "x", "max_tokens": 50})
        found = http.get("/v1/load").json()
        assert found["kv_pages_total"] == 64 and found["kv_cache_usage_perc"] == 0
        assert found["tokens_per_second"] > 0
