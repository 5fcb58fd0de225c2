"""What the endpoints share: the engine once it is loaded, the options, the metrics, and the requests under way.

Owns the answer to "can this server take a request now?". Invariant: `live` holds every exchange whose work runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from quire.core.adapters import AdapterFacts
from quire.engine.async_llm import AsyncLLM
from quire.serve.batch.space import SpaceLimits
from quire.serve.batch.store import BatchStore, StoreThread
from quire.serve.config import ServerConfig
from quire.serve.http.answers import AnswerMaker
from quire.serve.http.bodies import BodyMemory
from quire.serve.http.decoding import BodyDecoder
from quire.serve.http.delivery import ExchangeTask
from quire.serve.http.exchange import Exchange
from quire.serve.http.ignored import IgnoredLog, IgnoredParams
from quire.serve.http.keys import KeyRing
from quire.serve.http.refusal import Refusal, unavailable
from quire.serve.http.threads import SHORT_BODY_BYTES, LargeWorkLock, WorkThreads
from quire.serve.openai.logprobs import TokenNames
from quire.serve.openai.prompts import PromptMaker
from quire.serve.openai.tooling import MessageStyle, style_of
from quire.serve.openai.validation import RequestLimits, check_model
from quire.serve.ops.beside import keep_going
from quire.serve.ops.loop_monitor import LoopMonitor
from quire.serve.ops.metrics import Metrics
from quire.serve.ops.recorder import Recorder
from quire.serve.ops.traces import Traces, open_traces

T = TypeVar("T")


class ServerState:
    """State of one server process."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.ignored_log = IgnoredLog()
        self.keys = KeyRing(config.api_key, config.api_key_file, config.api_processes)
        self._bodies = BodyMemory(config.max_pending_body_bytes)
        self.large_work_lock = LargeWorkLock()
        self._body_threads = WorkThreads("quire-bodies", self.large_work_lock)
        self.answers = AnswerMaker()
        self.recorder = Recorder(config.record, config.record_prompts)
        self.live: set[ExchangeTask] = set()
        self.draining = False
        self.started_s = time.time()
        self.loop_monitor = LoopMonitor(self.metrics.loop.note)
        self.engine_lost = asyncio.Event()
        """Set when a request finds the engine dead."""
        limits = SpaceLimits(config.max_data_bytes, config.max_data_bytes_per_key)
        self.store = StoreThread(BatchStore(pathlib.Path(config.data_dir), limits)) if config.data_dir else None
        """Files and batches; None when the operator keeps none."""
        self.batch_news = asyncio.Event()
        """Set when a batch was made or is to be cancelled."""
        self.at_start: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """Work that runs beside the requests, from the time that the engine is loaded."""
        self._beside: list[asyncio.Task[None]] = []
        self.traces: Traces | None = None
        """Where spans of requests go; None when the operator wants none, or before the engine is loaded."""
        self._llm: AsyncLLM | None = None
        self._prompts: PromptMaker | None = None
        self._limits: RequestLimits | None = None
        self._own_names: tuple[str, ...] = ()
        """Of the model itself; `limits` has those of adapters too."""
        self._adapters: list[AdapterFacts] = []
        """Those that `limits` knows."""
        self._style: MessageStyle | None = None
        self._variables: frozenset[str] | None = None
        self._names: dict[bool, TokenNames] = {}

    def attach(self, llm: AsyncLLM) -> None:
        """The engine is loaded: requests can be served from now on."""
        self._llm, self._prompts = llm, PromptMaker(llm, self.large_work_lock)
        if self.config.calibration:
            llm.expectations.calibrate(pathlib.Path(self.config.calibration))
        self.loop_monitor.start()
        self._own_names = tuple(llm.config.served_model_name) or (llm.model_name,)
        self._limits = RequestLimits(
            model_names=self._own_names,
            logits_width=llm.logits_width,
            max_logprobs=llm.config.max_logprobs,
            max_sequences=self.config.max_prompts,
            max_logprob_cells=self.config.max_logprob_cells,
            max_len=llm.max_model_len,
            has_priorities=llm.config.scheduling_policy == "priority",
            defaults=llm.default_sampling,
        )
        self._style = style_of(self.config, llm)
        if self.config.enable_chat_template_kwargs:
            self._variables = frozenset() if llm.chat_template is None else llm.chat_template.variables
        self._names = {as_ids: TokenNames(llm.tokenizer, as_ids) for as_ids in (False, True)}
        self.metrics.model_name, self.metrics.max_adapters = llm.model_name, llm.config.max_loras
        self.traces = open_traces(self.config.otlp_traces_endpoint, llm.model_name)
        self._beside = [asyncio.create_task(keep_going(work)) for work in self.at_start]

    @property
    def llm(self) -> AsyncLLM:
        """The engine. Raises a 503 Refusal until it is loaded."""
        if self._llm is None:
            raise _loading()
        return self._llm

    @property
    def prompts(self) -> PromptMaker:
        """Text work for the loaded model (503 until then)."""
        if self._prompts is None:
            raise _loading()
        return self._prompts

    @property
    def limits(self) -> RequestLimits:
        """What the loaded model allows (503 until then)."""
        if self._limits is None:
            raise _loading()
        adapters = self.llm.stats().adapters
        if adapters is not self._adapters:  # a new snapshot of the engine's
            self._adapters = adapters
            names = self._own_names + tuple(one.name for one in adapters)
            if names != self._limits.model_names:
                self._limits = dataclasses.replace(self._limits, model_names=names)
        return self._limits

    def choose_model(self, exchange: Exchange, name: str | None) -> None:
        """Note which model the body names. 404 unless this server knows it; None passes."""
        check_model(name, self.limits.model_names)
        if name is not None and name not in self._own_names:
            exchange.adapter = name

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the loaded model; empty until then."""
        return () if self._limits is None else self.limits.model_names

    @property
    def template_variables(self) -> frozenset[str] | None:
        """What `chat_template_kwargs` may set: what the chat template looks at. None: the operator allows nothing."""
        if self._llm is None:
            raise _loading()
        return self._variables

    @property
    def style(self) -> MessageStyle:
        """How the loaded model writes tool calls and reasoning (503 until then)."""
        if self._style is None:
            raise _loading()
        return self._style

    def token_names(self, as_ids: bool | None) -> TokenNames:
        """How tokens are called in answers: by their text, or by their ids (503 until the model is loaded)."""
        if not self._names:
            raise _loading()
        return self._names[bool(as_ids)]

    def check_open(self) -> None:
        """503 unless new work is taken."""
        if self.draining:
            raise unavailable("draining", "The server is shutting down.")
        if self._llm is None:
            raise _loading()

    def check_healthy(self) -> None:
        """503 unless new work is taken, and an engine is there and makes progress."""
        self.check_open()
        if self.llm.is_recovering:
            raise unavailable("engine_lost", "The engine stopped and is being started again.")
        if not self.llm.healthy():
            raise unavailable("engine_stalled", "The engine makes no progress.")

    async def read(self, exchange: Exchange, decoder: BodyDecoder[T]) -> T:
        """The decoded JSON body. Raises what reading and decoding raise, QueueFull when too many large bodies are being
        read, and 503 until the engine is loaded."""
        config = self.config
        with self._bodies.share() as grow:
            data = await exchange.read_body(config.max_body_bytes, config.body_timeout, grow)
            most = self.llm.max_model_len
            return await self.parse(lambda: decoder.decode(data, exchange.ignored, most_ids=most), len(data))

    async def parse(self, work: Callable[[], T], n_bytes: int) -> T:
        """What `work` makes of a body of `n_bytes`, in a thread if it is long. Raises what `work` raises, or QueueFull
        when bodies pile up."""
        return await self._body_threads.run(work, n_bytes, SHORT_BODY_BYTES)

    def note_ignored(self, ignored: IgnoredParams) -> None:
        """Count and log the fields of a request, or of a batch's line, that do nothing."""
        if ignored.n:
            self.ignored_log.take(ignored)
            self.metrics.count_ignored(ignored.counts)

    async def run_exchange(self, exchange_task: ExchangeTask, work: Coroutine[Any, Any, T]) -> T:
        """Run the work of an exchange where shutdown can find it. Raises what the work raises, or ClientGone."""
        self.live.add(exchange_task)
        try:
            return await exchange_task.run(work)
        finally:
            self.live.discard(exchange_task)

    def close(self) -> None:
        """Drop waiting work on bodies and texts, and what runs beside the requests; let go of the disk."""
        for task in self._beside:
            task.cancel()
        self.loop_monitor.close()
        self.answers.close()
        self._body_threads.close()
        if self.traces is not None:
            self.traces.close()
        if self.store is not None:
            self.store.close()
        if self._prompts is not None:
            self._prompts.close()


def _loading() -> Refusal:
    return unavailable("loading", "The model is still loading.")
