"""Shared by all tests: GPU tests are skipped where no GPU is; a small checkpoint with transformers as its oracle."""

from __future__ import annotations

import gc
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

TEXT = [
    "def add(a, b):\n    return a + b\n",
    "The quick brown fox jumps over the lazy dog. ",
    "0123456789 αβγ 漢字 🙂",
] * 3

pytest_plugins = ["second_look", "lost_worker"]

N_BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if N_BESIDE > 1:
    # Processes side by side share the cores. OpenMP's threads wait for each other by spinning: with more threads than
    # cores small models take three times the time. Read when torch is imported, also by processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // N_BESIDE)))

LONGEST = (
    "test_experts_hopper.py", "test_attention_triton.py", "test_conviction.py", "test_web_page.py",
    "test_rank_engines.py", "test_rank_drafts.py", "test_link.py", "test_speculative.py", "test_conditions.py",
    "test_rank_recovery.py", "test_recurrent_engines.py", "test_drafts_grammar.py", "test_traffic.py",
    "test_api_process_ends.py", "test_families.py", "test_serve_live.py", "test_batch_deaths.py", "test_needle.py",
    "test_rank_models.py", "test_draft_trees_distribution.py", "test_signals.py", "test_http_pipelines.py",
    "test_head_apart.py", "test_flash.py", "test_constrained.py", "test_seeded_bugs.py", "test_node_engines.py",
    "test_batch_faults.py", "test_async_llm.py", "test_sample_triton.py", "test_state_hopper.py", "test_kernel_lora.py",
    "test_latent_hopper.py", "test_draft_trees_grammar.py", "test_beam_machine.py", "test_marks.py", "test_drafts.py",
    "test_http_batches.py", "test_without_triton.py", "test_drafts_families.py", "test_text_commands.py",
    "test_rules.py", "test_context_engines.py", "test_http_hostile.py", "test_calibrate.py",
    "test_draft_grammar_distribution.py", "test_steps_that_follow.py", "test_api_processes.py", "test_recovery.py",
    "test_decode_hopper.py", "test_adapter_engines.py", "test_draft_leavers.py", "test_beam_search.py",
    "test_examples.py", "test_draft_leaks.py", "test_kernels_triton.py", "test_w4a16_hopper.py",
    "test_batch_machine.py", "test_xml_enforced.py", "test_structured_output.py", "test_w8a8_hopper.py",
    "test_mistakes_document.py", "test_latent_rows_hopper.py", "test_standard_files.py", "test_course.py",
    "test_web_page_text.py", "test_draft_trees.py", "test_attention_trees.py", "test_web_page_tools.py",
    "test_draft_distribution.py", "test_rank_faults.py", "test_kernel_state_triton.py", "test_family_engine.py",
    "test_kernel_moe.py", "test_dummy_codes.py", "test_pipeline_engines.py", "test_fit_live.py", "test_hostile_rows.py",
    "test_needle_families.py", "test_grammar_routes.py", "test_plan_against_measured.py", "test_expert_balance.py",
    "test_client_examples.py", "test_lora_hopper.py", "test_context_parallel.py", "test_qgemm.py", "test_speculate.py",
    "test_footprint.py", "test_http_tls.py", "test_kernel_mla.py", "test_garbage.py", "test_lost_worker.py",
    "test_reduce.py", "test_suffix_tree.py", "test_attention_cpu.py", "test_trees.py", "test_loop_live.py",
    "test_bench_serve.py", "test_json_scan.py", "test_plan.py", "test_online.py", "test_gguf_engine.py",
    "test_loop_monitor.py", "test_cuda_cache.py", "test_gguf_families.py", "test_http_fuzz.py", "test_kv_fp8.py",
)  # fmt: skip
"""Files that take 10 s and more beside others, the longest first. Several processes begin with them, lest one be left
at the end to one process alone; that needs `--no-loadscope-reorder`."""


def pytest_configure(config: pytest.Config) -> None:
    """Tests of signals need children that hear them, also when this run was started in the background with SIGINT
    ignored, or with nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    # Hundreds of processes are started: each would compile all of Quire again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # How long an example or its making takes says how busy the machine is.
    calm = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.register_profile("calm", calm)
    hypothesis.settings.load_profile("calm")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(pathlib.Path(item.fspath).name, len(LONGEST)))
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0:
        return
    for item in items:
        if item.get_closest_marker("gpu") or "gpu" in pathlib.Path(item.fspath).parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and items live as long as the run: to look for garbage while they are made takes a quarter of that."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Each engine that ends has all garbage looked for, which takes 0.2 s beside torch and transformers, or 0.01 s
    without what lives on."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of a float32 Llama: 2 layers, 4 heads on 2 KV heads, context 512."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXT, vocab_size=320, special_tokens=["<|end|>"], show_progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def oracle(checkpoint: pathlib.Path) -> Any:
    """transformers on the same files, float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
