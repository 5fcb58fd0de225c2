"""`LLM`: the engine in this process, for scripts and notebooks. Names and shapes as vLLM users know them.

Owns driving the step loop. Does not own the engine's parts (`engine/build`).
Invariant: outputs come back in the order of the prompts; a refused prompt refuses the whole call before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from tqdm import tqdm

from quire.config.engine import EngineConfig
from quire.core.errors import ConfigError, EngineError, InvalidParameter
from quire.core.events import Cancel, CancelSeq, EngineStats, SeqDelta, Submit
from quire.core.outputs import RequestOutput
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.build import build_engine
from quire.engine.core import StepRecord
from quire.engine.frontend import Frontend
from quire.engine.intake import Prompt
from quire.engine.outflow import OpenRequest

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
        self._open: dict[str, OpenRequest] = {}

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

        sampling_params: one for all, one a prompt, or None for the model's defaults. Raises RequestError for the first
        bad prompt.
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
        for one in opened:
            self._submit(one)
        try:
            self._run(opened, use_tqdm)
        finally:
            self._cancel([one for one in opened if not one.finished])
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
        """Complete one prompt, yielding each new part. Leaving the iteration early cancels the request."""
        params = msgspec.structs.replace(sampling_params or SamplingParams(), output_kind=OutputKind.DELTA)
        one = self._prepare(prompt, params)
        self._submit(one)
        try:
            while not one.finished:
                for delta in self.engine.step():
                    if delta.request_id == one.request.request_id:
                        part = self._take(delta)
                        output = one.output([part]) if part is not None else None
                        if output is not None:
                            yield output
        finally:
            self._cancel([] if one.finished else [one])

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

    def _prepare(self, item: Prompt | dict[str, Any], params: SamplingParams) -> OpenRequest:
        prompt: Prompt
        if isinstance(item, dict):
            if not {"prompt_token_ids", "prompt"} & set(item):
                raise InvalidParameter(
                    "prompts", item, "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"
                )
            prompt = item.get("prompt_token_ids") or item["prompt"]
        else:
            prompt = item
        request = self._intake.request(prompt, params)
        return OpenRequest(
            request, prompt if isinstance(prompt, str) else None, self._frontend.tokenizer, self._intake.clock
        )

    def _submit(self, one: OpenRequest) -> None:
        self.engine.handle(Submit(one.request))
        self._open[one.request.request_id] = one

    def _run(self, opened: list[OpenRequest], use_tqdm: bool) -> None:
        with tqdm(total=len(opened), desc="Generating", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            n_tokens, n_left = 0, len(opened)
            while n_left:
                n_finished = 0
                for delta in self.engine.step():
                    one = self._open.get(delta.request_id)
                    self._take(delta)
                    n_tokens += len(delta.token_ids)
                    n_finished += one is not None and one.finished
                n_left -= n_finished
                if n_finished:
                    elapsed_s = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(f"{n_tokens / elapsed_s:.0f} output tok/s", refresh=False)
                    bar.update(n_finished)

    def _take(self, delta: SeqDelta) -> Any:
        one = self._open.get(delta.request_id)
        if one is None:
            return None
        part, stop_now = one.take(delta)
        if stop_now:
            self.engine.handle(CancelSeq(delta.request_id, delta.index))
        if one.finished:
            del self._open[delta.request_id]
        return part

    def _cancel(self, unfinished: list[OpenRequest]) -> None:
        if unfinished:
            self.engine.handle(Cancel([one.request.request_id for one in unfinished]))
            for one in unfinished:
                self._open.pop(one.request.request_id, None)

    def _final(self, one: OpenRequest) -> RequestOutput:
        for completion in one.completions:
            if completion.finish_reason == "error":
                raise EngineError(f"request {one.request.request_id} failed: {completion.stop_reason}")
        output = one.output(one.completions)
        assert output is not None
        return output


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)
