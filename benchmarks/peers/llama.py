"""llama.cpp through the C API of its Python package `llama-cpp-python`, as a child of `lines.Worker`.

Runs in an environment of its own, without Quire and torch. `llama_cpp.server` answers one request at a time, so
batches and traffic go through `llama_decode` with several sequences, with the loop of `lines.continuous`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp as api
import numpy as np

from benchmarks.peers.lines import Row, continuous, serve

N_BATCH = 2048


class Model:
    """One file; a context is made when a run needs other limits than the one before."""

    def __init__(self, path: str, threads: int) -> None:
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.threads, self.length = threads, api.llama_model_n_ctx_train(self.model)
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.limits: tuple[int, int, bool] | None = None
        self.batch = api.llama_batch_init(N_BATCH, 0, 1)

    def open(self, slots: int, length: int, unified: bool) -> None:
        """A context of `slots` sequences of up to `length` tokens; in one common cache if `unified`."""
        if self.limits != (slots, length, unified):
            if self.context:
                api.llama_free(self.context)
            options = api.llama_context_default_params()
            options.n_ctx = slots * (-(-length // 256) * 256)
            options.n_seq_max, options.n_batch, options.n_ubatch = slots, N_BATCH, 512
            options.n_threads = options.n_threads_batch = self.threads
            options.kv_unified, options.no_perf = unified, True
            self.context = api.llama_init_from_model(self.model, options)
            if not self.context:
                raise SystemExit(f"llama.cpp makes no context of {slots} x {length} tokens")
            self.limits = slots, length, unified
        self.memory = api.llama_get_memory(self.context)
        api.llama_memory_clear(self.memory, True)

    def rows(self, rows: Sequence[Row]) -> np.ndarray:
        """Run rows; float32 logits [wanted rows, vocabulary], valid until the next call."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, slot, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
        code = api.llama_decode(self.context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code} for {len(rows)} rows")
        n_wanted = sum(row[3] for row in rows)
        found = np.ctypeslib.as_array(api.llama_get_logits(self.context), shape=(n_wanted, self.vocab_size))
        return np.asarray(found)

    def step(self, rows: Sequence[Row]) -> list[int]:
        return [int(token) for token in self.rows(rows).argmax(1)]

    def free(self, slot: int) -> None:
        api.llama_memory_seq_rm(self.memory, slot, -1, -1)

    def run(self, prompts: list[list[int]], output_lens: list[int], slots: int, unified: bool) -> Any:
        """All requests; the figures of `lines.continuous`."""
        longest = max(len(prompt) + n for prompt, n in zip(prompts, output_lens, strict=True))
        self.open(slots, longest, unified)
        return continuous(self.step, self.free, prompts, output_lens, slots, N_BATCH)

    def logits(self, ids: list[int], path: str) -> Any:
        """Write the logits of every position of one prompt as float32 [n, vocabulary] to a .npy file."""
        self.open(1, len(ids), False)
        np.save(path, self.rows([(token, i, 0, True) for i, token in enumerate(ids)]))
        return {}

    def replies(self, prompts: list[list[int]], longest: int, ends: list[int]) -> list[list[int]]:
        """Greedy token ids after each prompt, one prompt after the other, without the one that ended it."""
        found = []
        for prompt in prompts:
            self.open(1, self.length, False)
            (token,) = self.step([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)])
            reply: list[int] = []
            while token not in ends and len(reply) < longest:
                reply.append(token)
                (token,) = self.step([(token, len(prompt) + len(reply) - 1, 0, True)])
            found.append(reply)
        return found


def quantise(source: str, target: str, dtype: str, threads: int) -> None:
    """Rewrite a GGUF file with llama.cpp's own rounding. dtype: Q8_0, Q4_0, Q4_K_M."""
    options = api.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(api, f"LLAMA_FTYPE_MOSTLY_{dtype}"), threads
    code = api.llama_model_quantize(source.encode(), (target + ".part").encode(), ctypes.byref(options))
    if code != 0:
        raise SystemExit(f"llama_model_quantize returned {code} for {target}")
    os.replace(target + ".part", target)


def prepare(op: str, **options: Any) -> tuple[Any, Callable[..., Any]]:
    """op `quantise` rewrites a file; `load` keeps a model and answers `run` and `logits`."""
    api.llama_backend_init()
    if op == "quantise":
        quantise(**options)
        return {}, lambda: None
    model = Model(**options)
    version = {"llama-cpp-python": api.__version__, "system": api.llama_print_system_info().decode()}
    return version, lambda op, **request: getattr(model, op)(**request)


if __name__ == "__main__":
    serve(prepare)
