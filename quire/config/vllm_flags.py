"""vLLM's options (0.26, some of older versions) that are none here, and llama.cpp's flags: what to do instead.

Data alone; `config/foreign.py` reads it. An option of ours with the same name wins over its row here.
docs/vllm.md is made from this and from vLLM's own list (`benchmarks/vllm_document.py`), of which none may be missing.
A name that ends in ! is a switch on the command line, one that ends in * takes several values, one that ends in { a
JSON object, whose values are judged one by one.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Same(NamedTuple):
    """Options of which some values say what Quire does anyway; others are refused."""

    names: str
    values: str
    """Accepted, as lower-case text; true and false for switches."""
    because: str
    """What Quire does."""
    instead: str
    """What to do for another value."""


class Group(NamedTuple):
    """Options that share one answer."""

    names: str
    answer: str


RENAMED: Final = {"api_server_count": "api_processes", "max_num_scheduled_tokens": "max_num_batched_tokens"}
"""vLLM's name → ours, with the same meaning."""

SHORT: Final = {
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-dpn": "data_parallel_rank", "-dpr": "data_parallel_start_rank", "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address", "-dpp": "data_parallel_rpc_port", "-dpb": "data_parallel_backend",
    "-dph": "data_parallel_hybrid_lb", "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb", "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size", "-ep": "enable_expert_parallel", "-asc": "api_server_count",
    "-q": "quantization", "-n": "nnodes", "-r": "node_rank", "-O": "optimization_level", "-sc": "speculative_config",
    "-dc": "diffusion_config", "-cc": "compilation_config", "-ac": "attention_config",
}  # fmt: skip
"""vLLM's short flags → the options."""
SHORT_OF_PARTS: Final = SHORT | {"-O": "compilation_config"}
"""The same with a part: -O.mode=3. -O3 is a level, -O.mode of the compilation."""

SAME: Final = (
    Same("data_parallel_size_local", "1",
         "ranks divide layers (-tp, -pp), sequences (-dp) or tokens (-pcp)",
         "leave it out, and run one server a device behind a balancer"),
    Same("decode_context_parallel_size", "1", "ranks of -tp divide heads",
         "--prefill-context-parallel-size N --context-parallel-method ring divides tokens"),
    Same("cp_kv_cache_interleave_size dcp_kv_cache_interleave_size", "1",
         "a ring's tokens are dealt out one by one", "leave it out"),
    Same("data_parallel_rank data_parallel_start_rank", "0", "data-parallel ranks are on one machine",
         "run one server a device behind a balancer"),
    Same("distributed_executor_backend", "mp uni none auto",
         "ranks are processes, of several machines with --nnodes", "leave it out"),
    Same("enable_chunked_prefill!", "true", "long prompts are always read in parts",
         "--max-num-batched-tokens of the longest prompt reads each prompt in one step"),
    Same("enable_log_requests! enable_log_outputs!", "false", "requests are not logged",
         "--access-log logs a line a request; contents are never logged"),
    Same("disable_log_requests! disable_uvicorn_access_log!", "true", "requests are not logged",
         "--access-log logs a line a request"),
    Same("enable_log_deltas!", "true false", "contents are never logged", "leave it out"),
    Same("swap_space cpu_offload_gb kv_offloading_size", "0 none", "nothing is moved to the CPU's memory",
         "choose a smaller model, a shorter --max-model-len, or --device cpu"),
    Same("trust_remote_code!", "true false",
         "known families need none of a checkpoint's code, which is never run; others are refused", "leave it out"),
    Same("tokenizer_mode", "auto hf fast", "the tokenizer is that of tokenizer.json",
         "give a --tokenizer with a tokenizer.json"),
    Same("config_format", "auto hf", "config.json is read", "convert the checkpoint to the Hugging Face layout"),
    Same("model_impl", "auto vllm", "models are Quire's own", "leave it out"),
    Same("runner", "auto generate pooling", "one engine makes text and embeddings", "leave it out"),
    Same("convert", "auto none embed", "one engine makes text and embeddings",
         "leave it out: there are no classifiers and no rewards"),
    Same("task", "auto generate embed embedding", "one engine makes text and embeddings", "leave it out"),
    Same("logprobs_mode", "raw_logprobs", "logprobs are those of the model, before temperature and penalties",
         "leave it out"),
    Same("prefix_caching_hash_algo", "sha256 builtin xxhash sha256_cbor xxhash_cbor",
         "prefixes are found in a tree by their tokens, without hashes", "leave it out"),
    Same("scheduler_reserve_full_isl!", "true false", "a request starts when the pages of its prompt are there",
         "leave it out"),
    Same("disable_sliding_window!", "false", "windows are as config.json has them",
         "set them with --hf-overrides '{\"sliding_window\": null}'"),
    Same("disable_cascade_attn!", "true false", "a prefix that sequences share is read once where that is quicker",
         "leave it out"),
    Same("disable_custom_all_reduce! disable_nccl_for_dp_synchronization!", "true false",
         "one device has nothing to reduce", "leave it out"),
    Same("disable_chunked_mm_input!", "true false", "prompts are text", "leave it out"),
    Same("async_scheduling!", "true", "steps are planned while others run", "--pipeline-depth 1"),
    Same("stream_interval", "1", "a stream sends each token as it comes", "leave it out"),
    Same("num_scheduler_steps", "1", "each step is planned by itself", "leave it out"),
    Same("max_num_partial_prefills max_long_partial_prefills", "1",
         "prompts share a step as the scheduler orders them",
         "--max-num-batched-tokens, --long-prefill-token-threshold"),
    Same("prefill_schedule_interval", "1", "prompts are looked at in each step", "--max-stall-factor"),
    Same("watermark", "0 0.0 0.01", "no page is held back", "leave it out"),
    Same("chat_template_content_format", "auto", "found out from the template", "leave it out"),
    Same("response_role", "assistant", "answers have the role assistant", "leave it out"),
    Same("trust_request_chat_template!", "false", "the operator alone gives templates", "--chat-template FILE"),
    Same("return_tokens_as_token_ids!", "false", "tokens in logprobs are texts, with their bytes beside them",
         "a request may ask for it by return_tokens_as_token_ids"),
    Same("exclude_tools_when_tool_choice_none!", "true", "tool_choice none leaves the tools out of the prompt",
         "leave it out"),
    Same("enable_prompt_tokens_details! enable_request_id_headers!", "true false", "replies always have them",
         "leave it out"),
    Same("enable_force_include_usage!", "false", "streams have the usage when a request asks for it",
         "clients send stream_options {\"include_usage\": true}"),
    Same("use_tqdm_on_load! use_fp64_gumbel! fail_on_environ_validation! aggregate_engine_logging!"
         " enable_offline_docs! enable_server_load_tracking!", "false", "it is off", "leave it out"),
    Same("enable_ssl_refresh! log_error_stack! enable_tokenizer_info_endpoint! tokens_only! grpc!"
         " enable_per_request_metrics!", "false", "it is off", "leave it out"),
    Same("ssl_cert_reqs", "0", "clients need no certificate", "end TLS in a proxy that asks for certificates"),
    Same("fingerprint_mode", "none", "system_fingerprint is not sent", "leave it out"),
    Same("allow_deprecated_quantization! calculate_kv_scales! enable_return_routed_experts! enable_prompt_embeds!"
         " enable_cumem_allocator! kv_sharing_fast_prefill! enable_mm_embeds! interleave_mm_strings! mm_encoder_only!",
         "false", "it is off", "leave it out"),
    Same("limit_mm_per_prompt{", "0", "models are of text alone", "leave it out"),
    Same("skip_mm_profiling! language_model_only!", "true false", "models are of text alone", "leave it out"),
    Same("override_attention_dtype", "auto none", "attention computes in the model's type", "--dtype"),
    Same("renderer_num_workers", "1", "prompts have threads of their own", "--api-processes N"),
    Same("use_v2_block_manager! disable_frontend_multiprocessing! multi_step_stream_outputs! enable_reasoning!",
         "true false", "there is no such choice any more", "leave it out"),
)  # fmt: skip

NO_EFFECT: Final = (
    Group("attention_backend moe_backend linear_backend mamba_backend gdn_prefill_backend ir_op_priority"
          " enable_flashinfer_autotune! enable_bf16x3_router_gemm! optimization_level performance_mode",
          "kernels are Quire's own; `quire kernels` says which runs and why"),
    Group("cudagraph_capture_sizes* max_cudagraph_capture_size max_seq_len_to_capture",
          "sizes of CUDA graphs follow from --max-num-seqs; --enforce-eager switches graphs off"),
    Group("safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size"
          " max_parallel_loading_workers ignore_patterns* pt_load_map_location",
          "weights are read once, in parallel, from safetensors alone"),
    Group("numa_bind! numa_bind_nodes* numa_bind_cpus*", "bind the process with numactl"),
    Group("kv_cache_metrics! kv_cache_metrics_sample cudagraph_metrics! enable_mfu_metrics!"
          " enable_logging_iteration_details! show_hidden_metrics_for_version jit_monitor_mode jit_monitor_verbose!"
          " collect_detailed_traces* enable_mm_processor_stats!", "/metrics and the web page have what is measured"),
    Group("max_log_len disable_access_log_for_endpoints", "contents are never logged, requests only by --access-log"),
    Group("distributed_timeout_seconds cpu_distributed_timeout_seconds",
          "a rank that gives no sign of life for 6 s is lost"),
    Group("guided_decoding_backend guided_decoding_disable_fallback!", "constrained output is made by llguidance"),
)  # fmt: skip

REFUSED: Final = (
    Group("data_parallel_address data_parallel_rpc_port data_parallel_backend"
          " data_parallel_hybrid_lb! data_parallel_external_lb! data_parallel_multi_port_external_lb!"
          " data_parallel_supervisor_port dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s"
          " dp_supervisor_probe_failure_threshold dcp_comm_backend enable_dbo! ubatch_size dbo_decode_token_threshold"
          " dbo_prefill_token_threshold ray_workers_use_nsight! worker_use_ray! all2all_backend",
          "ranks are of one machine: leave it out, and run one server a machine behind a balancer"),
    Group("enable_ep_weight_filter! enable_elastic_ep! expert_placement_strategy",
          "the checkpoint's order says where experts are at first; --enable-eplb moves them: leave it out"),
    Group("mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode"
          " enable_mamba_cache_stochastic_rounding! mamba_cache_philox_rounds",
          "recurrent states and their snapshots are sized by the memory that is there: leave it out"),
    Group("diffusion_config", "models of diffusion are not served: leave it out"),
    Group("media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type"
          " mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
          " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
          " video_pruning_rate mm_tensor_ipc mm_ipc_gpu_memory_gb allowed_local_media_path allowed_media_domains"
          " io_processor_plugin disable_mm_preprocessor_cache!", "models are of text alone: leave it out"),
    Group("lora_dtype", "adapters have the model's dtype: leave it out"),
    Group("fully_sharded_loras! lora_target_modules* default_mm_loras enable_tower_connector_lora!"
          " specialize_active_lora! enable_mixed_moe_lora_format! enable_moe_shared_loras! lora_extra_vocab_size"
          " enable_prompt_adapter!", "adapters are LoRA as their folders say: leave it out"),
    Group("spec_method spec_model spec_tokens speculative_model num_speculative_tokens",
          "give it in --speculative-config, for instance '{\"method\": \"ngram\", \"num_speculative_tokens\": 5}'"),
    Group("offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params*"
          " cpu_offload_params* kv_offloading_backend", "nothing is moved to the CPU's memory: choose a smaller model, "
          "a shorter --max-model-len, or --device cpu"),
    Group("kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
          "prompts and decodes run in one engine, which sends its pages and weights nowhere: leave it out"),
    Group("quantization_config kv_cache_dtype_skip_layers*",
          "a checkpoint says itself how it is quantised; --quantization rounds others, all layers alike"),
    Group("scheduler_cls worker_cls worker_extension_cls logits_processors* logits_processor_pattern middleware*"
          " tool_parser_plugin reasoning_parser_plugin model_class_overrides additional_config",
          "code of others is not loaded into the server: leave it out, or change Quire's source"),
    Group("compilation_config attention_config kernel_config", "kernels are Quire's own and need no settings: leave it "
          "out, or --enforce-eager without CUDA graphs"),
    Group("structured_outputs_config", "constrained output is always on: see --structured-outputs-compile-seconds, "
          "--structured-outputs-compile-memory and --reasoning-parser"),
    Group("reasoning_config", "requests bring thinking_token_budget; see --reasoning-parser"),
    Group("profiler_config enable_layerwise_nvtx_tracing!",
          "measure with `quire bench` and docs/bench.md, or run under nsys"),
    Group("pooler_config", "the request says how states become a vector (`pooling`): leave it out"),
    Group("hf_token", "a token on the command line is seen by `ps`: set HF_TOKEN, or run `hf auth login`"),
    Group("hf_config_path", "config.json is read from the model's folder: put it there, or use --hf-overrides"),
    Group("code_revision", "code of checkpoints is never run: leave it out"),
    Group("tokenizer_revision", "--revision is for the model and its tokenizer: fetch another tokenizer with "
          "`hf download NAME --revision REV` and give its folder as --tokenizer"),
    Group("model_loader_extra_config model_weights", "weights are read from the model's folder: leave it out"),
    Group("prefix_match_unit", "prefixes are shared by whole pages: --block-size"),
    Group("device_ids", "set CUDA_VISIBLE_DEVICES for the server's process"),
    Group("rope_scaling rope_theta", "give it in --hf-overrides, for instance '{\"rope_theta\": 1000000}'"),
    Group("uds", "give --host 127.0.0.1 and --port"),
    Group("ssl_ca_certs ssl_ciphers", "end TLS in a proxy that has these settings"),
    Group("h11_max_incomplete_event_size", "--max-header-bytes and --max-body-bytes"),
    Group("h11_max_header_count", "--max-headers"),
    Group("disable_fastapi_docs!", "/openapi.json has the routes' shapes and nothing of the model: leave it out"),
    Group("enable_flash_late_interaction!", "late interaction is not scored: leave it out"),
    Group("fingerprint_value", "system_fingerprint is not sent: leave it out"),
    Group("tool_server", "tools run where the client is: leave it out"),
    Group("log_config_file", "--uvicorn-log-level and --access-log; lines go to standard error"),
)  # fmt: skip

PYTHON: Final = ("enable_mm_processor_stats", "model_weights", "mamba_config")
"""Of `EngineArgs` alone."""

LLAMA_CPP: Final = {
    "-m --model-path": "give the .gguf file as MODEL: quire serve FILE.gguf",
    "-hf -hfr --hf-repo": "give the hub name as MODEL: quire serve org/name",
    "-c --ctx-size": "--max-model-len N",
    "-ngl --gpu-layers --n-gpu-layers": "--device cuda computes all layers on the GPU, --device cpu none",
    "-t --threads -tb --threads-batch": "--num-threads N",
    "-np --parallel": "--max-num-seqs N",
    "-b --batch-size -ub --ubatch-size": "--max-num-batched-tokens N",
    "--predict --n-predict": "requests say max_tokens",
    "-fa --flash-attn": "leave it out: attention never writes its scores to memory",
    "-cb --cont-batching -nocb --no-cont-batching": "leave it out: sequences are always batched as they come",
    "-ctk --cache-type-k -ctv --cache-type-v": "--kv-cache-dtype",
    "--mlock --no-mmap --mmap": "leave it out: weights are read into memory of their own",
    "--jinja --no-jinja": "leave it out: the model's own template is always used",
    "--chat-template-file": "--chat-template FILE",
    "-a --alias": "--served-model-name NAME",
    "--embedding --embeddings": "leave it out: /v1/embeddings is always there",
    "--metrics --slots --props": "leave it out: /metrics is always there",
    "--reasoning-format": "--reasoning-parser",
    "--temp": "requests say temperature; --override-generation-config '{\"temperature\": 0.7}' gives a default",
    "-md --model-draft --draft --draft-max":
        "--speculative-config '{\"method\": \"draft_model\", \"model\": FOLDER, \"num_speculative_tokens\": N}'",
    "--lora --lora-scaled": "--enable-lora --lora-modules NAME=FOLDER, in PEFT's layout",
    "-mm --mmproj": "leave it out: models are of text alone",
    "-sm --split-mode -ts --tensor-split -mg --main-gpu":
        "--tensor-parallel-size N, and CUDA_VISIBLE_DEVICES for which GPUs",
    "--no-webui": "--disable-page",
    "--rope-freq-base": "--hf-overrides '{\"rope_theta\": ...}'",
    "-s": "--seed N",
}
"""llama.cpp's flags → what to use."""
