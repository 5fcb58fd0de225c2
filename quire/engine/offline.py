"""The engine in this process, driven by its callers: prompts in, finished outputs or a stream out.

Owns the step loop. Does not own what users call (`engine/llm`, `engine/vectors`) nor the engine's parts.
Invariants: a refused prompt refuses the whole call before it starts; whoever steps the engine, every delta reaches the
request that it belongs to.
"""

from __future__ import annotations

import collections
import contextlib
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from quire.config.engine import EngineConfig
from quire.core.adapters import LoRARequest
from quire.core.beams import BeamTerms
from quire.core.commands import Cancel, Submit
from quire.core.errors import EngineError, InvalidParameter, QueueFull, Words, shown
from quire.core.events import SeqDelta
from quire.core.outputs import RequestOutput
from quire.core.prompts import PromptType
from quire.core.request import Pooling
from quire.core.sampling import SamplingParams
from quire.core.ticker import ticking
from quire.core.units import counted
from quire.engine.build import build_engine
from quire.engine.frontend import Frontend
from quire.engine.garbage import gc_kept_quiet
from quire.engine.interrupts import undivided
from quire.engine.output_processor import OpenRequest, PartBuffer

UNUSED_PARTS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds", "token_type_ids")
"""What vLLM's prompts may have and no model here can read."""
UNUSED_ARGUMENTS = {
    "tokenization_kwargs": "Encode the text with `tokenizer` and give token ids.",
    "chat_template": "Texts are compared as they stand: render them before.",
    "mm_processor_kwargs": "Models are of text alone.",
}
"""Arguments of vLLM's methods that say nothing here → what to do."""
Bar = bool | Callable[..., Any]
"""Whether to show progress, or what makes the bar in the place of tqdm."""


class OfflineEngine:
    """One engine and its open requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        frontend = Frontend.load(config)  # first: what it lacks is said before weights are made or read
        self.engine, ready = build_engine(config)
        self._frontend = frontend.attach(ready)
        self._input_processor = self._frontend.input_processor
        self._open: dict[str, tuple[OpenRequest, PartBuffer | None]] = {}
        """Submitted and unfinished, with a buffer for those that are streamed."""
        self._is_shut_down = False

    def _finished(self, opened: list[OpenRequest], use_tqdm: Bar) -> list[RequestOutput]:
        """Run requests to their end; outputs are in their order."""
        try:
            self._run(opened, use_tqdm)
        finally:
            self._cancel(opened)
        return [self._final(one) for one in opened]

    def _prepare(
        self,
        item: PromptType,
        params: SamplingParams,
        pooling: Pooling | None = None,
        priority: int = 0,
        beams: BeamTerms | None = None,
        adapter: LoRARequest | None = None,
    ) -> OpenRequest:
        if self._is_shut_down:
            raise EngineError("this engine was shut down: make another LLM")
        prompt: Any = item
        text, salt = item if isinstance(item, str) else None, ""
        if isinstance(item, dict):
            prompt, salt = _taken_apart(item)
            text = item.get("prompt")
        request = self._input_processor.request(
            prompt, params, pooling=pooling, beams=beams, priority=priority, cache_salt=salt
        )
        if adapter is not None:
            request.adapter, request.content_id = self._loaded(adapter)
        if request.params.structured_outputs is not None:
            self.engine.grammars.check(request.params.structured_outputs)
        return OpenRequest(request, text, self._frontend.tokenizer, self._input_processor.clock)

    def _loaded(self, wanted: LoRARequest) -> tuple[str, str]:
        """Name and hash of an adapter, which is read if the engine has none under it. Raises RequestError, LoadError
        and ConfigError."""
        if not isinstance(wanted, LoRARequest):
            raise InvalidParameter("lora_request", wanted, "a LoRARequest, or None")
        adapters, name = self.engine.adapters, wanted.lora_name
        known = next((facts for facts in adapters.facts if facts.name == name), None)
        if wanted.lora_path and (known is None or known.path != wanted.lora_path or wanted.load_inplace):
            known = adapters.load(name, wanted.lora_path, in_place=True)
        elif known is None:
            hint = "Give lora_path, the folder of the adapter." if self.config.enable_lora else "Set enable_lora=True."
            raise InvalidParameter("lora_request", name, "the name of an adapter that is loaded", hint)
        return name, known.content_id

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

    def _feed(self, waiting: collections.deque[OpenRequest], buffer: PartBuffer | None = None) -> None:
        """Submit from the left as many as the queue takes now."""
        while waiting:
            request = waiting[0].request
            with undivided():
                try:
                    self.engine.handle(Submit(request))
                except QueueFull:
                    if self.engine.has_work():
                        return
                    raise
                self._open[request.request_id] = (waiting.popleft(), buffer)

    def _run(self, opened: list[OpenRequest], use_tqdm: Bar) -> None:
        waiting = collections.deque(opened)
        unfinished = {one.request.request_id for one in opened}
        make = use_tqdm if callable(use_tqdm) else tqdm
        # Without a terminal the bar would be one endless line: the log says every ten seconds how far it is.
        disable = None if use_tqdm is True else not use_tqdm
        bar = make(total=len(opened), desc="Generating", unit="req", disable=disable, dynamic_ncols=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(bar)
            stack.enter_context(gc_kept_quiet())
            ticker = None
            if use_tqdm is True and bar.disable:
                ticker = stack.enter_context(ticking("generating", len(opened)))
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
                    if ticker is not None:
                        ticker.advance(n_done - n_finished)
                    n_finished = n_done

    def _step(self) -> tuple[int, set[str]]:
        """One step of the engine, each delta to its request: (new tokens, ids of the requests that ended)."""
        with undivided():
            return self._deliver(self.engine.step())

    def _deliver(self, deltas: list[SeqDelta]) -> tuple[int, set[str]]:
        n_tokens = 0
        ended = set()
        for delta in deltas:
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
        output = one.output(one.whole())
        assert output is not None
        return output


def check_adapters(adapters: Iterable[LoRARequest | None]) -> None:
    """InvalidParameter where one name stands for several folders in one call."""
    paths: dict[str, str] = {}
    for one in adapters:
        if isinstance(one, LoRARequest) and one.lora_path:
            path = paths.setdefault(one.lora_name, one.lora_path)
            if path != one.lora_path:
                limit = f"the same for all prompts that name the adapter {shown(one.lora_name)}, and {shown(path)} was"
                raise InvalidParameter("lora_path", one.lora_path, limit, "Give each folder a name of its own.")


def refuse_unused(**given: object) -> None:
    """InvalidParameter for an argument of vLLM's that only None can stand for here."""
    for name, value in given.items():
        if value is not None:
            raise InvalidParameter(name, value, "None", UNUSED_ARGUMENTS[name])


def _taken_apart(item: Any) -> tuple[Any, str]:
    """The text or token ids of a prompt that is a dict, and its salt."""
    if not {"prompt_token_ids", "prompt"} & set(item):
        raise InvalidParameter("prompts", item, "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'")
    for name in UNUSED_PARTS:
        if item.get(name):
            raise InvalidParameter(f"prompts: {name}", item[name], "absent: models are of text alone")
    ids = item.get("prompt_token_ids")
    if isinstance(ids, (str, bytes)):
        raise InvalidParameter("prompts: prompt_token_ids", ids, "a list of token ids")
    return (item.get("prompt", "") if ids is None else ids), item.get("cache_salt") or ""


def one_each(name: str, values: Any, n: int, kind: str) -> list[Any]:
    """A list of `n` values, from what can be one. Raises InvalidParameter for anything else. kind: of a value."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InvalidParameter(name, values, f"{kind}, or a list with one for each prompt")
    if len(values) != n:
        raise wrong_number(name, len(values), n)
    return list(values)


def wrong_number(name: str, n_values: int, n_prompts: int) -> InvalidParameter:
    """The error for a list that has not one value for each prompt."""
    given = Words(f"{counted(n_values, 'value')} for {counted(n_prompts, 'prompt')}")
    return InvalidParameter(name, given, "one, or one for each prompt")


def as_list(prompts: Any) -> list[Any]:
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
