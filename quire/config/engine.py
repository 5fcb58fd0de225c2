"""`EngineConfig`: every option of the engine, once. Flags (`quire serve --help`) and docs are generated from it.

Owns names, types, defaults, bounds and meaning. Does not own what depends on the model or machine
(`config/resolve.py`). Invariant: `EngineConfig(...)` followed by `verify()` leaves only values that make sense alone.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.config.adapter import MAX_RANK, check_adapters
from quire.config.eplb import read_eplb
from quire.config.shapes import PREFIX, check_shape
from quire.config.speculative import read_speculative
from quire.core.errors import ConfigError, shown
from quire.core.units import format_bytes, parse_bytes

MIN_COMPILE_BYTES = 64 << 20
MOST_SEQS, MOST_TOKENS = 65_536, 1 << 24
MAX_NAME_CHARS = 256
"""Of a name under which the API knows the model."""

FOREIGN_QUANTIZATIONS = """awq awq_marlin gptq gptq_marlin fp_quant modelopt modelopt_fp4 modelopt_mxfp8
    bitsandbytes gguf compressed-tensors torchao auto-round inc mxfp4 mxfp8 petit_nvfp4 quark experts_int8 moe_wna16
    deepspeedfp fbgemm_fp8 ptpc_fp8 tpu_int8"""
"""Of vLLM: most are formats of checkpoints."""


def _doc(text: str, extra: dict[str, Any] | None = None, **bounds: float) -> Meta:
    """A field's meaning; `extra` as in `config/options.py`."""
    # The stubs of msgspec declare Meta as overloads, one for numbers, which keyword bounds of one type do not select.
    return Meta(description=text, extra=extra, **bounds)  # type: ignore[call-overload, no-any-return]


class EngineConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of one engine. Spelling follows vLLM: field `max_num_seqs` is flag `--max-num-seqs`."""

    model: Annotated[
        str, _doc("Folder in the Hugging Face layout, .gguf file, hub name, or shape:NAME: random weights of that"
                  " shape; token ids only without --tokenizer. Empty: the demo model, but shape:llama-3.1-8b in"
                  " `quire simulate`.")
    ] = ""  # fmt: skip
    tokenizer: Annotated[str, _doc("Folder, .gguf file or hub name of a tokenizer that is not with the model.")] = ""
    revision: Annotated[str, _doc("Branch, tag or commit of a hub model.")] = ""
    served_model_name: Annotated[
        list[str], _doc("Names under which the API knows the model; default: the model argument.")
    ] = []
    skip_tokenizer_init: Annotated[bool, _doc("Serve token ids only; no tokenizer is loaded.")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        _doc(
            "auto reads *.safetensors or the .gguf file; dummy makes seeded random weights from config.json,"
            " in the coding of its quantization_config.",
            extra={
                "words": {"gguf": "auto", "hf": "auto"},
                "refused": {
                    "pt npcache": "files of torch.save run code when they are read: convert the model to safetensors"
                    " (save_pretrained of transformers), or take a revision that has it",
                    "tensorizer runai_streamer runai_streamer_sharded sharded_state fastsafetensors instanttensor"
                    " mistral bitsandbytes": "give a folder with *.safetensors in the Hugging Face layout",
                },
            },
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        _doc(
            "Type of weights and activations; auto takes the checkpoint's.",
            extra={"words": {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}},
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int8-g32", "int4", "int4-g32", "int4-g128", "fp8"],
        _doc(
            "auto rounds nothing, and keeps what kernels here can multiply by as it is: quantised matrices of a"
            " checkpoint, which says itself how it is quantised, and on a CPU the Q8_0 and Q4_0 blocks of a GGUF file;"
            " none decodes those too. fp8, on a GPU, rounds weights, of experts too, and activations in each product,"
            " to e4m3. With the others weights are rounded to 8 or 4 bits, with one scale an output channel (int8), for"
            " each 64 weights (int4) or for each 32 or 128 (-g32, -g128). int8-g32 is for a CPU only. Activations are"
            " rounded to 8 bits in each product, but on a GPU not beside 4 bits; embeddings and norms keep their type,"
            " and so does the KV cache without kv_cache_dtype. On Intel CPUs with AMX, prompts are read with vector"
            " instructions where groups are of 32, else with tile registers.",
            extra={
                "refused": {
                    FOREIGN_QUANTIZATIONS: "a checkpoint says itself how it is quantised, and so does a .gguf"
                    " file: leave it out; to round another one, give int8 or int4, or fp8 on a GPU"
                }
            },
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda", "null"],
        _doc("auto takes cuda when a GPU is there; null runs the whole engine without a model, on a virtual clock."),
    ] = "auto"
    seed: Annotated[
        int, _doc("Seed of dummy weights and of sampling: request number i without its own seed draws from (seed, i),"
                  " so that the same requests in the same order give the same text.", ge=0)
    ] = 0  # fmt: skip
    max_model_len: Annotated[
        int,
        _doc(
            "Longest prompt plus output in tokens; 0 takes the model's own limit. 32k is 32000, 32K is 32768.",
            extra={"words": {"auto": 0, "-1": 0}, "counts": True},
            ge=0,
        ),
    ] = 0
    max_num_seqs: Annotated[
        int, _doc("Most sequences at once (slots); 0 chooses by device, by memory for states, and half of the tokens of"
                  " a small step.", ge=0, le=MOST_SEQS)
    ] = 0  # fmt: skip
    max_num_batched_tokens: Annotated[
        int, _doc("Most tokens in one step, at least max_num_seqs: one of each sequence that decodes, then those of"
                  " prompts. 0 chooses by device.", extra={"counts": True}, ge=0, le=MOST_TOKENS)
    ] = 0  # fmt: skip
    max_num_waiting: Annotated[
        int, _doc("Most sequences that wait for a slot, n of each request; a server refuses more with 429.", ge=1)
    ] = 8192
    max_engine_restarts: Annotated[
        int, _doc("Most times in ten minutes that a server starts its engine again after it was killed, crashed or"
                  " hung; 0: the server ends with its engine.", ge=0, le=100)
    ] = 3  # fmt: skip
    engine_stall_timeout: Annotated[
        float, _doc("Seconds without progress after which an engine, or a rank of it, counts as hung: its stacks go to"
                    " the log and it is started again; 0 chooses by device.", ge=0)
    ] = 0.0  # fmt: skip
    load_timeout: Annotated[
        float, _doc("Seconds in which a server's engine process must have loaded the model, and then its API processes"
                    " the tokenizer; after them the stacks of the engine go to the log and the server ends, as when a"
                    " file system does not answer. Downloads from the hub are not limited, and the clock starts again"
                    " after them. 0: any.", ge=0)
    ] = 1800.0  # fmt: skip
    long_prefill_token_threshold: Annotated[
        int, _doc("Most tokens of one prompt in one step; 0 means only the step's own budget.", ge=0)
    ] = 0
    max_stall_factor: Annotated[
        float,
        _doc(
            "While sequences decode, prompts are cut so that a step takes at most so many times as long as without"
            " them, by an estimate from the model's shape. What is above 1 grows up to nine times where prompts wait"
            " behind the first, by how many wait for each sequence that decodes: 1.75 becomes 7.75 in a burst, 1.1"
            " becomes 1.9. 0 chooses: 1.75 in a server on a GPU, otherwise no limit; 1000 is no limit either. Else give"
            " more than 1.",
            ge=0,
        ),
    ] = 0.0
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "bf16", "fp8", "fp8_e4m3", "int8"],
        _doc(
            "Type of keys and values in the cache; auto takes that of dtype, bf16 is short for bfloat16. On a GPU fp8,"
            " which is fp8_e4m3, rounds them to 8 bits under the scales of the checkpoint, or 1: half the memory. int8"
            " rounds them to integers with a float32 scale for each token and head: about half, nearer, and on a GPU"
            " slower than fp8.",
            extra={
                "refused": {
                    "float16 fp8_e5m2 fp8_inc fp8_ds_mla fp8_per_token_head int8_per_token_head"
                    " nvfp4": "leave it out, or give int8, or fp8 on a GPU"
                }
            },
        ),
    ] = "auto"
    block_size: Annotated[Literal[1, 2, 4, 8, 16, 32, 64, 128], _doc("Tokens a KV page holds.")] = 16
    gpu_memory_utilization: Annotated[
        float, _doc("Share of GPU memory that weights, activations and KV pages may take together.", gt=0, le=1)
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        str, _doc("Size of the KV pool, for instance 4GiB; empty: by gpu_memory_utilization, on CPU what sequences can"
                  " fill, at most a quarter of free memory.")
    ] = ""  # fmt: skip
    num_gpu_blocks_override: Annotated[int, _doc("Exact number of KV pages; 0 computes it.", ge=0)] = 0
    disable_hybrid_kv_cache_manager: Annotated[
        bool, _doc("Keep keys and values behind sliding windows too: all layers share one page table.")
    ] = False
    enable_prefix_caching: Annotated[bool, _doc("Share the pages of equal prefixes between requests.")] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], _doc("fcfs: order of arrival; priority: lower `priority` first, then arrival.")
    ] = "fcfs"
    pipeline_depth: Annotated[
        int, _doc("Steps in flight; 2 hides the host's work, 1 waits for each step. Each further pipeline stage adds"
                  " one.", ge=1, le=8)
    ] = 2  # fmt: skip
    deterministic: Annotated[
        bool, _doc("Every request gets the same tokens and log-probabilities, bit for bit, whatever else runs, is"
                   " cached or is preempted. On a CPU with the native kernels that holds anyway for most models; on a"
                   " GPU it costs about 6 % of the speed; refused where it cannot be promised.")
    ] = False  # fmt: skip
    max_logprobs: Annotated[
        int, _doc("Largest logprobs or prompt_logprobs that a request may ask for.", ge=0, le=1000)
    ] = 20
    tensor_parallel_size: Annotated[
        int, _doc("Ranks that share every layer, one process each: on GPUs one GPU a rank, on a CPU for tests. The"
                  " model's heads and feed-forwards must be divisible among them.", ge=1, le=64)
    ] = 1  # fmt: skip
    pipeline_parallel_size: Annotated[
        int, _doc("Stages of neighbouring layers, each of tensor_parallel_size ranks. A step goes through all in turn;"
                  " meanwhile other stages compute steps of other sequences.", ge=1, le=64)
    ] = 1  # fmt: skip
    pp_layer_partition: Annotated[
        str, _doc("Layers of each stage, as 17,15; left out: as many on each. The last also has the head, which takes"
                  " as long as some layers when tokens are decoded (docs/parallel.md).")
    ] = ""  # fmt: skip
    data_parallel_size: Annotated[
        int, _doc("Data-parallel ranks, each of tensor_parallel_size ranks, with whole layers, a cache and sequences of"
                  " its own; max_num_seqs, max_num_batched_tokens and pages are of each.", ge=1, le=64)
    ] = 1  # fmt: skip
    prefill_context_parallel_size: Annotated[
        int, _doc("Ranks among which the tokens of a long prompt are divided, each with all weights (docs/parallel.md)."
                  " Not together with the parallel sizes above.", ge=1, le=64)
    ] = 1  # fmt: skip
    context_parallel_method: Annotated[
        Literal["auto", "ulysses", "ring"], _doc(
            "How these ranks attend: ulysses divides the heads of keys and values, ring the tokens, so that each page"
            " holds block_size tokens on each rank. auto divides heads as far as each rank has its own, then tokens.")
    ] = "auto"  # fmt: skip
    ulysses_degree: Annotated[
        int, _doc("Ranks of a ring that divide the heads of the same tokens. 0: 1 with ring, and with auto as many as"
                  " have heads of their own.", ge=0, le=64)
    ] = 0  # fmt: skip
    enable_expert_parallel: Annotated[
        bool, _doc("All ranks together divide the experts of a model, whole ones, instead of a part of each; their"
                   " number must be divisible by that of the ranks.")
    ] = False  # fmt: skip
    enable_eplb: Annotated[
        bool, _doc("Move experts between ranks by their load, so that all have as much to do (docs/parallel.md).")
    ] = False
    eplb_config: Annotated[
        dict[str, Any], _doc("How, as a JSON object. num_redundant_experts: copies of hot experts in each layer, all"
                             " ranks together (0); step_interval: steps between two rearrangements (3000); window_size:"
                             " steps before one whose loads count (1000).")
    ] = {}  # fmt: skip
    nnodes: Annotated[
        int, _doc("Machines on which the stages of a pipeline are, as many on each; every one runs this command with"
                  " its own node_rank (docs/parallel.md).", ge=1, le=64)
    ] = 1  # fmt: skip
    node_rank: Annotated[int, _doc("This machine of nnodes; 0 serves, the others run --headless.", ge=0)] = 0
    master_addr: Annotated[str, _doc("Address of node 0 at which the others reach it.")] = "127.0.0.1"
    master_port: Annotated[int, _doc("Port of node 0 at which the others meet it.", ge=1, le=65535)] = 29501
    num_threads: Annotated[
        int, _doc("Threads for compute on CPU, of each rank; 0 takes every core, shared among ranks.", ge=0, le=1024)
    ] = 0
    enable_lora: Annotated[
        bool, _doc("Serve adapters (LoRA, in PEFT's layout) beside the model, many in one batch; a request names one as"
                   " its model. See docs/adapters.md.")
    ] = False  # fmt: skip
    lora_experts: Annotated[bool, _doc("Adapters may be of experts; on a GPU places are much larger then.")] = False
    lora_modules: Annotated[
        list[str],
        _doc('Adapters to begin with, as NAME=FOLDER or {"name": NAME, "path": FOLDER}.', extra={"json_list": True}),
    ] = []
    max_loras: Annotated[
        int, _doc("Most different adapters in one step; each takes memory on the device.", ge=1, le=1024)
    ] = 4
    max_lora_rank: Annotated[
        int, _doc("Largest rank of an adapter; on a GPU each takes memory for it.", ge=1, le=MAX_RANK)
    ] = 16
    max_cpu_loras: Annotated[
        int, _doc("Most adapters kept on the host; others are read again when asked for. 0: 4 times max_loras.", ge=0)
    ] = 0
    lora_root: Annotated[
        str, _doc("Folder inside which POST /v1/load_lora_adapter may name adapters; empty: it takes none."
                  " --lora-modules may lie anywhere.")
    ] = ""  # fmt: skip
    enforce_eager: Annotated[bool, _doc("Do not capture CUDA graphs.")] = False
    enable_sleep_mode: Annotated[
        bool,
        _doc("Let the engine give its memory back and get it again: POST /sleep and /wake_up, LLM.sleep and wake_up."),
    ] = False
    check_weights: Annotated[bool, _doc("Refuse checkpoints with non-finite weights.")] = True
    disable_log_stats: Annotated[bool, _doc("Do not log throughput every ten seconds.")] = False
    structured_outputs_compile_seconds: Annotated[
        float, _doc("Processor seconds that one schema or grammar may take to compile, in a process of its own; one"
                    " that takes longer is refused.", ge=0.1, le=3600)
    ] = 5.0  # fmt: skip
    structured_outputs_compile_memory: Annotated[
        str, _doc("Memory that compiling one schema or grammar may take, for instance 1GiB.")
    ] = "1GiB"
    hf_overrides: Annotated[
        dict[str, Any], _doc("Fields of config.json, as a JSON object, that replace the checkpoint's; objects inside"
                             ' are merged, null takes a field away. {"rope_theta": 1000000}')
    ] = {}  # fmt: skip
    speculative_config: Annotated[
        dict[str, Any] | None,
        _doc(
            "Guess tokens ahead, as a JSON object, and verify several in a step; the answers stay the same, and drafts"
            ' stop where they do not pay. {"method": "ngram"} looks for what followed the same words earlier in the'
            ' text, {"method": "suffix"} in earlier answers too, {"method": "draft_model", "model": FOLDER} asks a'
            ' small model with the same tokens, {"method": "eagle3", "model": FOLDER} a head that was trained for the'
            ' model, {"method": "mtp"} the multi-token prediction module of the checkpoint. num_speculative_tokens: the'
            " most of a sequence in a step."
        ),
    ] = None
    generation_config: Annotated[
        str, _doc("Where default sampling and further end tokens come from: auto is the model's generation_config.json,"
                  " vllm takes none, and anything else is a folder with such a file.")
    ] = "auto"  # fmt: skip
    override_generation_config: Annotated[
        dict[str, Any],
        _doc('Fields of generation_config.json, as a JSON object, that replace the file\'s. {"temperature": 0.5}'),
    ] = {}
    download_dir: Annotated[str, _doc("Folder for models of the hub; empty: the hub's own (HF_HOME).")] = ""
    chat_template: Annotated[str, _doc("File with a Jinja chat template that replaces the tokenizer's.")] = ""
    allow_special_tokens_in_text: Annotated[
        bool,
        _doc(
            "Let a control token that is written out in a message, as <|im_start|>, become that token, as other engines"
            " do: whoever writes the message can then end it and speak as the system."
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.model.startswith(PREFIX):
            check_shape(self.model, self.load_format)
            self.load_format, self.skip_tokenizer_init = "dummy", self.skip_tokenizer_init or not self.tokenizer

    @property
    def is_simulated(self) -> bool:
        """Whether there is to be no model: every plan takes its time and gives made-up tokens."""
        return self.device == "null"

    def verify(self) -> None:
        """Check values that need no model; raises ConfigError naming the field, the value and the limit."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} = {value} is not allowed: it must be finite")
        try:
            msgspec.convert(msgspec.to_builtins(self), EngineConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine options: {error}") from None
        _check_names(self.served_model_name)
        _check_text(self)
        read_speculative(self.speculative_config)
        read_eplb(self)
        check_adapters(self)
        _check_sizes(self)


def _check_text(config: EngineConfig) -> None:
    if config.skip_tokenizer_init and config.chat_template:
        raise ConfigError(
            "chat_template needs a tokenizer, and skip_tokenizer_init (or a shape: model) leaves it out: leave"
            " chat_template out, and send token ids", param="chat_template",
        )  # fmt: skip


def _check_names(names: list[str]) -> None:
    for number, name in enumerate(names):
        where = f"served_model_name {number + 1} of {len(names)} = {shown(name)}"
        if not name.strip() or name != name.strip():
            raise ConfigError(
                f"{where} is blank, or begins or ends with a blank: no request could ask for it as it looks"
            )
        if not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise ConfigError(f"{where} must be at most {MAX_NAME_CHARS} printable characters")
        if name in names[:number]:
            raise ConfigError(f"{where} is given twice: give each name once")


def _check_sizes(config: EngineConfig) -> None:
    if 0 < config.max_stall_factor <= 1:
        raise ConfigError(
            f"max_stall_factor = {config.max_stall_factor:g} leaves no time for prompts beside decodes: give more "
            "than 1 (1.5 to 3 are usual), or 0 for the default"
        )
    n_tokens, n_seqs = config.max_num_batched_tokens, config.max_num_seqs
    if 0 < n_tokens < n_seqs:
        raise ConfigError(
            f"max_num_batched_tokens = {n_tokens} is less than max_num_seqs = {n_seqs}: raise one or lower the other",
            param="max_num_batched_tokens",
        )
    own = "structured_outputs_compile_memory"
    if parse_bytes(config.structured_outputs_compile_memory, own) < MIN_COMPILE_BYTES:
        raise ConfigError(
            f"{own} = {config.structured_outputs_compile_memory!r} is too little: give at least "
            f"{format_bytes(MIN_COMPILE_BYTES)}"
        )
    if config.kv_cache_memory_bytes and parse_bytes(config.kv_cache_memory_bytes, "kv_cache_memory_bytes") <= 0:
        raise ConfigError(f"kv_cache_memory_bytes = {config.kv_cache_memory_bytes!r} must be more than 0 bytes")
