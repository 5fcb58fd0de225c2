"""`LLM`: the engine in this process, for scripts and notebooks. Names, shapes and arguments as vLLM users know them.

Owns what users call to make text. Does not own vectors (`engine/vectors`), the step loop (`engine/offline`) nor the
options (`config/engine`, as `config/keywords` types them).
Invariant: outputs come back in the order of the prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from quire.compute.weights.hub import find_checkpoint
from quire.config.engine import EngineConfig
from quire.config.keywords import EngineOptions
from quire.config.mesh import mesh_of
from quire.config.options import keyword_options, keyword_signature
from quire.config.wording import in_python
from quire.core.adapters import LoRARequest
from quire.core.beams import BeamSearchOutput, BeamSearchParams
from quire.core.errors import ConfigError, InvalidParameter
from quire.core.events import EngineStats
from quire.core.outputs import Counter, Gauge, RequestOutput
from quire.core.prompts import Prompts, PromptType, TokensPrompt
from quire.core.sampling import OutputKind, SamplingParams
from quire.engine.beams import beam_output
from quire.engine.frontend import text_folder
from quire.engine.offline import Bar, as_list, check_adapters, one_each, refuse_unused
from quire.engine.sleep import check_sleep, check_wake
from quire.engine.step_record import StepRecord
from quire.engine.vectors import VectorEngine
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import read_tokenizer_config, special_strings

Message = dict[str, Any]
KEPT_TEMPLATES: Final = 8
"""Templates given to `chat` that stay compiled."""
_GAUGES: Final = {"num_requests_running": "n_running", "num_requests_waiting": "n_waiting"}
_COUNTERS: Final = {
    "prompt_tokens": "prompt_tokens", "generation_tokens": "generation_tokens", "computed_tokens": "computed_tokens",
    "prefix_cache_queries": "prefix_queries", "prefix_cache_hits": "prefix_hits", "num_preemptions": "preemptions",
    "engine_steps": "steps",
}  # fmt: skip
"""Names at /metrics → fields of `EngineStats`."""
_DRAFT_COUNTERS: Final = {
    "spec_decode_num_drafts": "n_drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""Where something is drafted."""
_WEIGHTS: Final = "weights stay as they were loaded: call shutdown() and make a new LLM with the new checkpoint"
_QUEUE: Final = "generate() takes any number of prompts at once, and stream() can be interleaved with it"
_PROFILE: Final = "set `on_step` for what each step did, or run `quire bench`"
NOT_HERE: Final = {
    "apply_model": "the model is no torch module: see docs/reading-order.md for where it is computed",
    "classify": "this model makes text and vectors, and has no classes: embed() and a classifier of your own",
    "collective_rpc": "one process computes, and runs no code of others: `on_step` tells what it does",
    "enqueue": _QUEUE,
    "enqueue_chat": _QUEUE,
    "wait_for_completion": _QUEUE,
    "reset_mm_cache": "models are of text alone, and there is no such cache",
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "init_weight_transfer_engine": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
}
"""Methods of vLLM's `LLM` that this one has not → what to do instead."""
TAKEN_IN_PART: Final = {
    "chat_template_content_format": "'auto'", "pooling_task": "None or 'embed'", "level": "1 or 2", "mode": "'abort'",
    "tags": "None, or weights and kv_cache together", "reset_running_requests": "False", "reset_connector": "False",
}  # fmt: skip
"""Arguments of methods → the values that they take; the rest raises InvalidParameter, as do others than None where
the signature has None alone."""


class LLM(VectorEngine):
    """An engine on one model. `LLM()` loads the bundled demo model; options are the fields of `EngineConfig`.

    vLLM's other options are taken where they say what Quire does anyway (docs/vllm.md); None stands for a default.
    """

    def __init__(self, model: str = "", **options: Unpack[EngineOptions]) -> None:
        with in_python(EngineConfig):
            self._load(keyword_options(EngineConfig, {"model": model, **options}, "LLM"))

    @classmethod
    def of_command_line(cls, config: EngineConfig) -> LLM:
        """An engine whose errors name flags and not keyword arguments."""
        made = cls.__new__(cls)
        made._load(config)
        return made

    def _load(self, config: EngineConfig) -> None:
        super().__init__(config)
        own = self._frontend.chat_template
        self._sources = [] if own is None else list(own.sources.values())
        """Of the chat templates whose marks the tokenizer knows."""
        self._template_of = functools.lru_cache(KEPT_TEMPLATES)(self._compile_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """An engine with the options of `EngineArgs(...)`."""
        return cls(**msgspec.structs.asdict(engine_args))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None with `skip_tokenizer_init`."""
        return self._frontend.tokenizer

    @property
    def logits_width(self) -> int:
        """Number of logits: token ids of prompts are below it."""
        return self._frontend.ready.logits_width

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once, over all replicas."""
        return self._frontend.ready.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and output together."""
        return self._frontend.ready.max_model_len

    def get_tokenizer(self) -> Any:
        """vLLM's spelling of `tokenizer`."""
        return self._frontend.tokenizer

    def get_default_sampling_params(self, **otherwise: Any) -> SamplingParams:
        """What the checkpoint's generation_config.json proposes; `otherwise`, and then `SamplingParams`' own defaults,
        for the rest."""
        return SamplingParams(**otherwise | self._frontend.generation.sampling)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token id lists, `TextPrompt`s or `TokensPrompt`s.

        sampling_params: one for all, one a prompt, or None for the model's defaults. Any number of prompts: they are
        queued as the queue drains. lora_request: the adapter of all, or one (or None) a prompt; it is read if it is not
        loaded. priority: one for all or one a prompt; lower ones run first, with scheduling_policy="priority". Raises
        RequestError for the first bad prompt, before anything starts. A sequence that fails later has finish_reason
        "error" and the reason as its `failure`; the others are not affected.
        """
        refuse_unused(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        items = as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or self.get_default_sampling_params()] * len(items)
        else:
            params = one_each("sampling_params", sampling_params, len(items), "a SamplingParams")
        if priority is None or isinstance(priority, int):
            priorities = [priority or 0] * len(items)
        else:
            priorities = one_each("priority", priority, len(items), "an integer")
        if isinstance(lora_request, (list, tuple)):
            adapters = one_each("lora_request", lora_request, len(items), "a LoRARequest")
        else:
            adapters = [lora_request] * len(items)
        check_adapters(adapters)
        opened = [
            self._prepare(item, one, priority=order, adapter=adapter)
            for item, one, order, adapter in zip(items, params, priorities, adapters, strict=True)
        ]
        return self._finished(opened, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
        priority: Sequence[int] | int | None = None,
    ) -> list[RequestOutput]:
        """`generate` on one conversation or a list of them, rendered with the model's chat template.

        chat_template: another template, as text. continue_final_message: go on with the last message (with
        add_generation_prompt=False). chat_template_kwargs: further variables of the template.
        """
        if chat_template_content_format != "auto":
            limit = "'auto': the form is found out from the template"
            raise InvalidParameter("chat_template_content_format", chat_template_content_format, limit)
        if not isinstance(messages, (list, tuple)):
            raise InvalidParameter("messages", messages, "a list of objects with role and content, or a list of such")
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self._chat_prompt(
                one, tools, add_generation_prompt, chat_template, continue_final_message, chat_template_kwargs
            )
            for one in conversations
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, mm_processor_kwargs
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; see `chat`."""
        prompt = self._chat_prompt(
            messages, tools, add_generation_prompt, chat_template, continue_final_message, chat_template_kwargs
        )
        return list(prompt["prompt_token_ids"])

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template: str | None,
        continue_final_message: bool,
        kwargs: dict[str, Any] | None,
    ) -> TokensPrompt:
        template, tokenizer = self._frontend.chat_template, self._frontend.tokenizer
        if not isinstance(chat_template, str | None):
            raise InvalidParameter("chat_template", chat_template, "a template, as text")
        if tokenizer is None:
            raise ConfigError("this engine runs without a tokenizer: give token ids to generate()")
        if chat_template is not None:
            template = self._template_of(chat_template)
        if template is None:
            raise ConfigError(
                "this model has no chat template: give chat_template=FILE (--chat-template FILE), or use generate()"
            )
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        return TokensPrompt(prompt_token_ids=tokenizer.encode(text, add_special_tokens=False), prompt=str(text))

    def _compile_template(self, source: str) -> ChatTemplate:
        config = self.config
        folder = text_folder(config, find_checkpoint(config.model, config.revision, config.download_dir))
        special = special_strings(read_tokenizer_config(folder))
        traces = not config.allow_special_tokens_in_text
        template = ChatTemplate({"default": source}, special, traces=traces)
        tokenizer = self._frontend.tokenizer
        if traces and tokenizer is not None:
            self._sources.append(source)
            tokenizer.learn_marks(self._sources)
        return template

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: Bar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most probable completions of each prompt that a beam search finds, best first.

        Which beams those are is said at `BeamSearchParams`. concurrency_limit: most prompts that are searched at once;
        None: as many as there is room for. Raises RequestError for the first bad prompt, before anything starts (for
        beams that may need more pages than there are, when their turn comes), and EngineError if a search failed.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameter("params", params, "a BeamSearchParams")
        params.__post_init__()  # fields may have been set since
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidParameter("concurrency_limit", concurrency_limit, "None or at least 1")
        sampling, terms = params.sampling(), params.terms()
        opened = [self._prepare(item, sampling, beams=terms, adapter=lora_request) for item in as_list(prompts)]
        most = concurrency_limit or max(1, len(opened))
        outputs = [
            output for at in range(0, len(opened), most) for output in self._finished(opened[at : at + most], use_tqdm)
        ]
        return [beam_output(output, self._frontend.tokenizer, params) for output in outputs]

    def stream(
        self, prompt: PromptType, sampling_params: SamplingParams | None = None, lora_request: LoRARequest | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding each new part; sampling_params, lora_request: as of `generate`.

        Streams may be interleaved with each other and with `generate`. Leaving the iteration early cancels the request.
        """
        params = sampling_params or self.get_default_sampling_params()
        one = self._prepare(prompt, params, adapter=lora_request)
        one.request.params = msgspec.structs.replace(one.request.params, output_kind=OutputKind.DELTA)
        return self._stream(one)

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

    def expert_loads(self) -> list[list[int]]:
        """Of each layer with experts, how many tokens chose each of them so far. Waits for the device."""
        return [] if self.engine.expert_load is None else self.engine.expert_load.counts()

    def get_metrics(self) -> list[Counter | Gauge]:
        """The numbers of the engine that a server has at /metrics, by the same names."""
        stats, labels = self.engine.stats(with_map=False), {"model_name": self._frontend.model_name}
        used = 1.0 - stats.n_pages_free / stats.n_pages if stats.n_pages else 0.0
        gauges = {name: getattr(stats, field) for name, field in _GAUGES.items()} | {"kv_cache_usage_perc": used}
        counters = _COUNTERS | (_DRAFT_COUNTERS if stats.accepted_at else {})
        return [
            *(Gauge(f"quire:{name}", labels, value) for name, value in gauges.items()),
            *(Counter(f"quire:{name}", labels, getattr(stats, field)) for name, field in counters.items()),
        ]

    def get_world_size(self, include_dp: bool = True) -> int:
        """Its ranks; include_dp: those of all data-parallel ranks, else of one."""
        mesh = mesh_of(self.config)
        return mesh.n_ranks if include_dp else mesh.n_ranks_each

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the pages that no open request holds; True if none are left. Other arguments must be False."""
        for name, given in (("reset_running_requests", reset_running_requests), ("reset_connector", reset_connector)):
            if given:
                raise InvalidParameter(name, given, "False: end the open requests first")
        return self.engine.scheduler.forget_prefixes()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: the pages, and at level 2 the weights too, which level 1 keeps in the host's memory.

        Open streams end with an error. Needs enable_sleep_mode=True. Raises ConfigError without it, InvalidParameter.
        """
        if mode != "abort":
            raise InvalidParameter("mode", mode, "'abort': sleep ends what is open")
        check_sleep(self.config, level)
        self.engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what `sleep` gave up; prefixes are not remembered. Raises SleepFailed if memory is short."""
        check_wake(self.config, tags)
        self.engine.wake_up()

    def is_sleeping(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return self.engine.is_asleep

    def shutdown(self) -> None:
        """Free the engine's thread and memory; the object cannot be used afterwards."""
        self._is_shut_down = True
        self.engine.shutdown()

    if not TYPE_CHECKING:  # a checker is to know which names there are

        def __getattr__(self, name: str) -> Any:
            if name in NOT_HERE:
                raise AttributeError(f"LLM.{name} is known in vLLM, not in Quire: {NOT_HERE[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


LLM.__init__.__signature__ = keyword_signature(EngineConfig, "model")  # type: ignore[attr-defined]
