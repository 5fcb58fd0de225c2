"""`LLM`: the engine in this process, for scripts and notebooks. Names and shapes as vLLM users know them.

Owns driving the step loop. Does not own the engine's parts (`engine/build`).
Invariants: outputs come back in the order of the prompts; a refused prompt refuses the whole call before it starts;
whoever steps the engine, every delta reaches the request that it belongs to.
"""

from __future__ import annotations

import collections
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, InvalidParameter, QueueFull
from quire.core.events import Cancel, EngineStats, Submit
from quire.core.outputs import RequestOutput
from quire.core.request import Pooling, pooling_params
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.build import build_engine
from quire.engine.core import StepRecord
from quire.engine.frontend import Frontend
from quire.engine.garbage import gc_kept_quiet
from quire.engine.intake import Prompt
from quire.engine.outflow import OpenRequest, PartBuffer

Message = dict[str, Any]


class LLM:
    """An engine on one model. `LLM()` loads the bundled demo model; options are the fields of `EngineConfig`."""

    def __init__(self, model: str = "", **options: Any) -> None:
        try:
            self.config = EngineConfig(model=model, **options)
        except TypeError as error:
            raise ConfigError(f"LLM options: {error}") from None
        self.config.verify()
        self.engine, ready = build_engine(self.config)
        self._frontend = Frontend.load(self.config).attach(ready)
        self._intake = self._frontend.intake
        self._open: dict[str, tuple[OpenRequest, PartBuffer | None]] = {}
        """Submitted and unfinished, with a buffer for those that are streamed."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None with `skip_tokenizer_init`."""
        return self._frontend.tokenizer

    @property
    def logits_width(self) -> int:
        """Number of logits: token ids of prompts are below it."""
        return self._frontend.ready.logits_width

    def get_tokenizer(self) -> Any:
        """vLLM's spelling of `tokenizer`."""
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults with what the checkpoint's generation_config.json proposes."""
        return SamplingParams(**self._frontend.generation.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | dict[str, Any]] | dict[str, Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token id lists, or {"prompt": ...} / {"prompt_token_ids": ...}.

        sampling_params: one for all, one a prompt, or None for the model's defaults. Any number of prompts: they are
        queued as the queue drains. Raises RequestError for the first bad prompt, before anything starts. A sequence
        that fails later has finish_reason "error" and the reason as its stop_reason; the others are not affected.
        """
        items = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(items)
        else:
            params = list(sampling_params)
        if len(params) != len(items):
            raise InvalidParameter(
                "sampling_params", f"{len(params)} values", f"one, or one for each of the {len(items)} prompts"
            )
        opened = [self._prepare(item, one) for item, one in zip(items, params, strict=True)]
        try:
            self._run(opened, use_tqdm)
        finally:
            self._cancel(opened)
        return [self._final(one) for one in opened]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt | dict[str, Any]] | dict[str, Any],
        pooling: Pooling = Pooling.LAST,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """`generate` of one vector a prompt instead of tokens: `pooled` of the outputs, not normalised."""
        opened = [self._prepare(item, pooling_params(), pooling) for item in _as_list(prompts)]
        try:
            self._run(opened, use_tqdm)
        finally:
            self._cancel(opened)
        return [self._final(one) for one in opened]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """`generate` on one conversation or a list of them, rendered with the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.render_chat(one, tools, add_generation_prompt) for one in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation."""
        template, tokenizer = self._frontend.chat_template, self._frontend.tokenizer
        if template is None or tokenizer is None:
            raise ConfigError("this model has no chat template: pass chat_template=FILE, or use generate()")
        text = template.render(list(messages), tools=tools, add_generation_prompt=add_generation_prompt)
        return tokenizer.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding each new part; sampling_params: None for the model's defaults.

        Streams may be interleaved with each other and with `generate`. Leaving the iteration early cancels the request.
        """
        params = sampling_params or self.get_default_sampling_params()
        one = self._prepare(prompt, params)
        one.request.params = msgspec.structs.replace(params, output_kind=OutputKind.DELTA)
        return self._stream(one)

    def _stream(self, one: OpenRequest) -> Iterator[RequestOutput]:
        buffer = PartBuffer()
        waiting = collections.deque([one])
        try:
            while True:
                parts = buffer.take()
                output = one.output(parts) if parts else None
                if output is not None:
                    yield output
                elif one.finished:
                    return
                else:
                    self._feed(waiting, buffer)
                    self._step()
        finally:
            self._cancel([one])

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        """Called after every committed step, for plots and logs."""
        return self.engine.on_step

    @on_step.setter
    def on_step(self, callback: Callable[[StepRecord], None] | None) -> None:
        self.engine.on_step = callback

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Free the engine's thread and memory; the object cannot be used afterwards."""
        self.engine.shutdown()

    def _prepare(
        self, item: Prompt | dict[str, Any], params: SamplingParams, pooling: Pooling | None = None
    ) -> OpenRequest:
        prompt: Prompt
        if isinstance(item, dict):
            if not {"prompt_token_ids", "prompt"} & set(item):
                raise InvalidParameter(
                    "prompts", item, "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"
                )
            given = item.get("prompt_token_ids")
            prompt = item.get("prompt", "") if given is None else given
        else:
            prompt = item
        request = self._intake.request(prompt, params, pooling=pooling)
        return OpenRequest(
            request, prompt if isinstance(prompt, str) else None, self._frontend.tokenizer, self._intake.clock
        )

    def _feed(self, waiting: collections.deque[OpenRequest], buffer: PartBuffer | None = None) -> None:
        """Submit from the left as many as the queue takes now; QueueFull only if it would never take the next one."""
        while waiting:
            request = waiting[0].request
            try:
                self.engine.handle(Submit(request))
            except QueueFull:
                if self.engine.has_work():
                    return
                raise
            self._open[request.request_id] = (waiting.popleft(), buffer)

    def _run(self, opened: list[OpenRequest], use_tqdm: bool) -> None:
        waiting = collections.deque(opened)
        unfinished = {one.request.request_id for one in opened}
        bar = tqdm(total=len(opened), desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True)
        with bar, gc_kept_quiet():
            n_tokens, n_finished = 0, 0
            while unfinished:
                self._feed(waiting)
                n_new_tokens, ended = self._step()
                n_tokens += n_new_tokens
                unfinished -= ended
                n_done = len(opened) - len(unfinished)
                if n_done > n_finished:
                    elapsed_s = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{n_tokens / elapsed_s:.0f} output tok/s", refresh=False)
                    bar.update(n_done - n_finished)
                    n_finished = n_done

    def _step(self) -> tuple[int, set[str]]:
        """One step of the engine, each delta to its request: (new tokens, ids of the requests that ended)."""
        n_tokens = 0
        ended = set()
        for delta in self.engine.step():
            found = self._open.get(delta.request_id)
            if found is None:
                continue
            one, buffer = found
            n_tokens += len(delta.token_ids)
            parts, command = one.take(delta, wants_parts=buffer is not None)
            if command is not None:
                self.engine.handle(command)
            if buffer is not None:
                for part in parts:
                    buffer.put(part)
            if one.finished:
                del self._open[delta.request_id]
                ended.add(delta.request_id)
        return n_tokens, ended

    def _cancel(self, opened: list[OpenRequest]) -> None:
        """End those that still run; nothing happens to the others."""
        running = [one.request.request_id for one in opened if self._open.pop(one.request.request_id, None)]
        if running:
            self.engine.handle(Cancel(running))

    def _final(self, one: OpenRequest) -> RequestOutput:
        output = one.output(one.completions)
        assert output is not None
        return output


def _as_list(prompts: Any) -> list[Any]:
    """One prompt, or the prompts of a list, array or other iterable."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, (str, dict)):
        return [prompts]
    try:
        items = list(prompts)
    except TypeError:
        raise InvalidParameter("prompts", prompts, "a text, token ids, or a list of them") from None
    return [items] if items and isinstance(items[0], numbers.Integral) else items
