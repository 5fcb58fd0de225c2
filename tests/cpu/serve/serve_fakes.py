"""An engine without a model under the real `AsyncLLM`: deterministic tokens, a pace, and faults on demand.

Everything but the model is real: input and output processors, tokenizer, chat template, streams. The reply to a
prompt is the text `reply_to(prompt ids)` in byte tokens, so tests know every answer beforehand.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.config.engine import EngineConfig
from quire.config.generation import GenerationDefaults
from quire.core.adapters import AdapterFacts
from quire.core.commands import (
    Cancel,
    CancelSeq,
    Command,
    Explain,
    LoadAdapter,
    Order,
    Sleep,
    Submit,
    UnloadAdapter,
    WakeUp,
)
from quire.core.errors import EngineDead, QuireError
from quire.core.events import (
    Chunk,
    Done,
    EngineReady,
    EngineStats,
    Explained,
    Explanation,
    FinishReason,
    ModelFacts,
    SeqDelta,
    StepGroup,
    StepOutputs,
)
from quire.core.failure import Code, Failure
from quire.core.logprobs import PackedLogprobs, TokenLogprobs
from quire.core.request import Request
from quire.core.structured import StructuredOutputsParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.command_reader import refusals
from quire.engine.frontend import Frontend
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import GrammarCompiler
from quire.text.grammar_trial import tried
from quire.text.tokenizer import HfTokenizer

END, USER, ASSISTANT = 256, 257, 258
LOGITS_WIDTH = 272
"""More than the tokenizer's 259 ids, as in models with a padded vocabulary."""
MAX_MODEL_LEN = 4096
FACTS = ModelFacts("bytes", n_parameters=1_500_000, hidden_size=3, weight_bytes=3_000_000, weights="bfloat16")
TEMPLATE = (
    "{% if tools %}<|user|>tools:{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.content == 'template, fail' %}{{ raise_exception('as asked') }}{% endif %}"
    "{% if m.role == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(marks: Sequence[str] = ()) -> HfTokenizer:
    """One token a byte, and three special ones; marks: more of these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", *marks])
    return HfTokenizer(backend, {"type": "ByteLevel"}, {"eos_token": "<|end|>"})


def reply_to(prompt: list[int], index: int = 0, seed: int | None = None) -> str:
    """The text that the fake model goes on with, long enough for every test."""
    mark = zlib.crc32(bytes(token % 256 for token in prompt) + str(seed).encode())
    return f"{mark:08x}/{index} " + "the pages of this book are numbered. " * 150


class FakeEngine:
    """Takes the place of `EngineLink`: one token a sequence every `delay_s`."""

    def __init__(self, marks: Sequence[str] = (), end: int = END) -> None:
        """marks: further control tokens of its tokenizer. end: its end token."""
        self.end = end
        self.delay_s = 0.0
        self.tokens_a_step = 1
        self.held = False
        """True: nothing is computed, requests wait."""
        self.stalled = False
        """True: not healthy, without being dead."""
        self.fault: Callable[[Request], bool] = lambda request: False
        """Requests whose sequences fail after two tokens, with `failure_of_faults`."""
        self.failure_of_faults = Failure(Code.NON_FINITE_LOGITS, "at 0x7f00")
        self.cached_tokens = 0
        self.drafts: tuple[int, int, list[int], float] = (0, 0, [], 0.0)
        """Times that drafts were verified, these drafts, the right ones by place, seconds saved."""
        self.drafts_of_one = (0, 0, 0)
        """The same of each request: times, drafts, kept ones."""
        self.asleep = 0
        """The level of its sleep."""
        self.sleep_failure: str | None = None
        self.failed_param: str | None = None
        """Why orders are not carried out."""
        self.adapters: dict[str, AdapterFacts] = {}
        self.text: str | None = None
        """Replaces `reply_to` for all requests."""
        self.running: dict[str, asyncio.Task[None]] = {}
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.tokens_made: dict[str, int] = {}
        self.failure: str | None = None
        self.grammar = ""
        """Of the last constrained request."""
        self.tokenizer = byte_tokenizer(marks)
        self._compiler: GrammarCompiler | None = None
        self._outputs: asyncio.Queue[StepOutputs | Explained | Done | None] = asyncio.Queue()
        self._n_prompt_tokens = self._n_generated = 0
        self._finished: dict[str, int] = {}

    async def send(self, *commands: Command) -> None:
        if self.failure is not None:
            raise EngineDead(self.failure)
        for command in commands:
            if isinstance(command, Submit):
                request = command.request
                self.submitted.append(request)
                self._n_prompt_tokens += len(request.prompt_token_ids)
                self.running[request.request_id] = asyncio.create_task(self._run(request))
            elif isinstance(command, Cancel):
                for request_id in command.request_ids:
                    self.cancelled.append(request_id)
                    self._drop(request_id)
            elif isinstance(command, Explain):
                self._outputs.put_nowait(Explained(command.ticket, self._explain(command.label)))
            elif isinstance(command, Order):
                self._obey(command)
            elif isinstance(command, CancelSeq):
                self.cancelled.append(f"{command.request_id}#{command.index}")

    async def receive_all(
        self, take: Callable[[StepOutputs], list[Command]], other: Callable[[Explained | Done], None]
    ) -> None:
        while True:
            outputs = await self._outputs.get()
            if outputs is None:
                raise EngineDead(self.failure or "gone")
            if isinstance(outputs, Explained | Done):
                other(outputs)
            else:
                await self.send(*take(outputs))

    def healthy(self) -> bool:
        return self.failure is None and not self.stalled

    def _explain(self, label: str) -> list[Explanation]:
        """Made-up times of the request that has this label."""
        asked = [request for request in self.submitted if request.label.startswith(f"{label}-")]
        return [
            Explanation(
                request.label, request.terms.tenant, len(request.prompt_token_ids), 1, admitted_s=0.25,
                first_token_s=0.5, ended_s=2.0, end="length", n_waiting_before=7, miss_position=1, miss_wanted=65,
                miss_cached=66, chunks=[Chunk(3, 0.3, 0, 8, 4)], n_outputs=9, steps=[StepGroup(1.0, 10, 4.0, 300)],
                n_drafts=self.drafts_of_one[0], draft_tokens=self.drafts_of_one[1], drafts_kept=self.drafts_of_one[2],
            )
            for request in asked
        ]  # fmt: skip

    def _obey(self, order: Order) -> None:
        error = self.sleep_failure
        if error is None and isinstance(order, Sleep):
            self.asleep = order.level
            for request_id in list(self.running):
                self._drop(request_id)
                why = Failure(Code.ENGINE_ASLEEP, "it sleeps")
                self._outputs.put_nowait(StepOutputs([SeqDelta(request_id, 0, [], FinishReason.ERROR, failure=why)]))
        elif error is None and isinstance(order, WakeUp):
            self.asleep = 0
        elif error is None and isinstance(order, LoadAdapter):
            self.adapters[order.name] = AdapterFacts(order.name, order.path, f"content of {order.path}", 8)
        elif isinstance(order, UnloadAdapter) and self.adapters.pop(order.name, None) is None:
            error = "no such adapter"
        self._outputs.put_nowait(StepOutputs([], self.stats()))
        self._outputs.put_nowait(Done(order.ticket, not self.running, error, self.failed_param))

    def close(self) -> None:
        for request_id in list(self.running):
            self._drop(request_id)

    def die(self, why: str = "the engine process ended with exit status -9") -> None:
        """What `kill -9` does."""
        self.failure = why
        for request_id in list(self.running):
            self._drop(request_id)
        self._outputs.put_nowait(None)

    def stats(self) -> EngineStats:
        n = len(self.running)
        return EngineStats(
            n_running=n,
            is_asleep=self.asleep > 0,
            adapters=list(self.adapters.values()),
            running_adapters=list(self.adapters)[:1],
            n_pages=64,
            n_pages_free=64 - n,
            prompt_tokens=self._n_prompt_tokens,
            generation_tokens=self._n_generated,
            prefix_queries=self._n_prompt_tokens,
            n_drafts=self.drafts[0],
            draft_tokens=self.drafts[1],
            accepted_at=self.drafts[2],
            draft_saved_s=self.drafts[3],
            finished=dict(self._finished),
            tree=[(-1, 4, n), (0, 2, n), (0, 3, 0), (-1, 1, 0)],
            expert_map=[bytes([16, 40, 0, 8]), bytes([16] * 4)],
            expert_layers=[1, 2],
            page_map=bytes([2] * n + [1] * 4 + [0] * (60 - n)),
        )

    def _drop(self, request_id: str) -> None:
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()
            self._finished["abort"] = self._finished.get("abort", 0) + 1
            self._outputs.put_nowait(StepOutputs([], self.stats()))

    async def _run(self, request: Request) -> None:
        while self.held:
            await asyncio.sleep(0.005)
        if request.params.structured_outputs is not None:
            self.grammar, error = self._tried(request.params.structured_outputs)
            if error is not None:
                self.running.pop(request.request_id, None)
                self._outputs.put_nowait(StepOutputs(refusals(request, error), self.stats()))
                return
        if request.pooling is not None:
            self._pool(request)
            return
        replies = [self._tokens(request, index) for index in range(request.params.n)]
        made = 0
        while any(made < len(reply) for reply in replies):
            await asyncio.sleep(self.delay_s)
            stop = made + self.tokens_a_step
            deltas = [
                self._delta(request, index, reply, made, min(stop, len(reply)))
                for index, reply in enumerate(replies)
                if made < len(reply)
            ]
            made = stop
            self.tokens_made[request.request_id] = made
            self._n_generated += sum(len(delta.token_ids) for delta in deltas)
            if self.fault(request) and made > 2:
                deltas = [
                    SeqDelta(request.request_id, i, [], FinishReason.ERROR, failure=self.failure_of_faults)
                    for i in range(len(replies))
                ]
                replies = []
            self._outputs.put_nowait(StepOutputs(deltas))
        self.running.pop(request.request_id, None)
        self._finished["length"] = self._finished.get("length", 0) + len(replies)
        self._outputs.put_nowait(StepOutputs([], self.stats()))

    def _tried(self, params: StructuredOutputsParams) -> tuple[str, QuireError | None]:
        """What the engine's trial says, without a process."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, LOGITS_WIDTH, [self.end])
        verdict = tried(self._compiler, params, lambda: None)
        return verdict.grammar, verdict.error()

    def _pool(self, request: Request) -> None:
        """The vector of a prompt: its first three token ids, or 1 where there are fewer."""
        self.running.pop(request.request_id, None)
        vector = [float(token) for token in [*request.prompt_token_ids, 1, 1][:3]]
        delta = SeqDelta(request.request_id, 0, [], FinishReason.STOP, pooled=vector)
        if self.fault(request):
            delta = SeqDelta(request.request_id, 0, [], FinishReason.ERROR, failure=self.failure_of_faults)
        self._outputs.put_nowait(StepOutputs([delta], self.stats()))

    def _tokens(self, request: Request, index: int) -> list[int]:
        seed = request.params.seed
        text = self.text if self.text is not None else reply_to(request.prompt_token_ids, index, seed)
        tokens = self.tokenizer.encode(text)
        if self.text is not None and request.end_token_ids:
            tokens.append(self.end)
        return tokens[: request.max_tokens]

    def _delta(self, request: Request, index: int, reply: list[int], start: int, stop: int) -> SeqDelta:
        params, tokens = request.params, reply[start:stop]
        delta = SeqDelta(request.request_id, index, tokens, n_cached=self.cached_tokens if start == 0 else 0)
        if params.logprobs is not None:
            delta.logprobs = PackedLogprobs.of([_row(token, params.logprobs) for token in tokens])
        if params.prompt_logprobs is not None and start == 0 and index == 0:
            rows = [_row(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:]]
            delta.prompt_logprobs = PackedLogprobs.of(rows)
        if stop == len(reply):
            ended = reply[-1] == self.end
            delta.finish_reason = FinishReason.STOP if ended else FinishReason.LENGTH
            delta.stop_token = self.end if ended else None
        return delta


def _row(token: int, n_top: int) -> TokenLogprobs:
    """The token itself is the most probable at even ids, second otherwise."""
    first, second = (token, (token + 1) % 256) if token % 2 == 0 else ((token + 1) % 256, token)
    top = [(first, -0.25), (second, -1.5), *((i, -3.0 - i / 8) for i in range(300, 320))]
    return TokenLogprobs(
        -0.25 if token == first else -1.5,
        1 if token == first else 2,
        [pair[0] % LOGITS_WIDTH for pair in top[:n_top]],
        [pair[1] for pair in top[:n_top]],
    )


async def make_llm(
    engine: FakeEngine, defaults: dict[str, float] | None = None, template: str = TEMPLATE, **options: object
) -> AsyncLLM:
    """An `AsyncLLM` over `engine`."""
    tokenizer = engine.tokenizer
    config = EngineConfig(served_model_name=["fake", "fake-alias"], **{"max_num_waiting": 64, **options})
    frontend = Frontend(
        config=config,
        model_name="fake",
        tokenizer=tokenizer,
        chat_template=ChatTemplate({"default": template}, {}, traces=not config.allow_special_tokens_in_text),
        generation=GenerationDefaults((engine.end,), defaults or {}),
    )
    ready = EngineReady(MAX_MODEL_LEN, 4096, page_size=16, logits_width=LOGITS_WIDTH, device="fake", model=FACTS)
    return AsyncLLM(frontend.attach(ready), engine)
