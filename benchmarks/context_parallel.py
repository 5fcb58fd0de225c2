"""Ulysses against the ring by length of a prompt, as bytes: `python benchmarks/context_parallel.py --output FILE.json`.

Whole engines of several processes on the CPU (gloo), a random Llama of 8 heads and few of keys and values. What rank 0
sends for attention is counted at its `Comm`, beside the planner's formula; the first tokens are those of one rank.
Seconds are of ranks that share this machine's cores: they say nothing of GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.machine import commit, hardware
from quire.compute.dist.gloo import GlooComm
from quire.planner.context import ring_keys_bytes, ring_queries_bytes, ulysses_bytes

LAYERS, HEADS, DIM, ITEM, PAGE, CHUNK, N_OUT = 2, 8, 32, 4, 16, 2048, 8
CALLS = {"ulysses": "all_to_all", "ring": "exchange"}


def write_model(folder: pathlib.Path, n_kv_heads: int) -> str:
    """A description; weights are random."""
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": HEADS * DIM,
        "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": DIM,
        "num_key_value_heads": n_kv_heads, "max_position_embeddings": 1 << 17, "torch_dtype": "float32",
    }))  # fmt: skip
    return str(folder)


@contextlib.contextmanager
def counted(method: str) -> Iterator[list[int]]:
    """Bytes that this process sends by the calls of a method, in one number."""
    name, n_bytes = CALLS[method], [0]
    original: Callable[..., Any] = getattr(GlooComm, name)

    def call(self: GlooComm, x: torch.Tensor, *given: Any) -> Any:
        n_bytes[0] += x.nbytes if name == "exchange" else x.nbytes // self.size * (self.size - 1)
        return original(self, x, *given)

    setattr(GlooComm, name, call)
    try:
        yield n_bytes
    finally:
        setattr(GlooComm, name, original)


def formula(method: str, n_tokens: int, n_kv_heads: int, n_ranks: int) -> float:
    """Bytes that a rank sends for a prompt in chunks."""
    total = 0.0
    for start in range(0, n_tokens, CHUNK):
        n = min(CHUNK, n_tokens - start)
        if method == "ulysses":
            own = HEADS // n_ranks + 2 * max(1, n_kv_heads // n_ranks)
            total += ulysses_bytes(-(-n // n_ranks), own * DIM, HEADS // n_ranks * DIM, ITEM, n_ranks)
        else:
            n_pages = -(-(start + n) // (PAGE * n_ranks))
            keys = ring_keys_bytes(n_pages * PAGE, 2 * n_kv_heads * DIM * ITEM, n_ranks)
            total += min(keys, ring_queries_bytes(-(-n // n_ranks), HEADS, DIM, DIM, ITEM, n_ranks))
    return LAYERS * total


def measured(llm: LLM, n_tokens: int) -> tuple[list[int], float]:
    """(first tokens, seconds until they are there) of a prompt that no cache knows."""
    prompt = {"prompt_token_ids": [(i * i + 7 * i + n_tokens) % 509 + 1 for i in range(n_tokens)]}
    start_s = time.perf_counter()
    (found,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=N_OUT, ignore_eos=True), use_tqdm=False)
    return list(found.outputs[0].token_ids), time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kv-heads", default="4,1")
    parser.add_argument("--output", default="")
    given = parser.parse_args()
    lengths = [int(one) for one in given.lengths.split(",")]
    rows = []
    for n_kv_heads in map(int, given.kv_heads.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(pathlib.Path(folder), n_kv_heads)
            options = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True,
                       "max_num_batched_tokens": CHUNK, "max_model_len": max(lengths) + 64, "max_num_seqs": 2,
                       "block_size": PAGE, "num_threads": 1, "enable_prefix_caching": False}  # fmt: skip
            expected = {}
            llm = LLM(model, **options)
            for length in lengths:
                expected[length] = measured(llm, length)
            llm.shutdown()
            for n_ranks in map(int, given.ranks.split(",")):
                for method in CALLS:
                    llm = LLM(model, **options, prefill_context_parallel_size=n_ranks, context_parallel_method=method)
                    for length in lengths:
                        with counted(method) as n_bytes:
                            tokens, seconds = measured(llm, length)
                        said = formula(method, length, n_kv_heads, n_ranks)
                        rows.append({
                            "method": method, "ranks": n_ranks, "kv_heads": n_kv_heads, "tokens": length,
                            "sent_bytes": n_bytes[0], "formula_bytes": said,
                            "equal_tokens": tokens == expected[length][0], "seconds": round(seconds, 2),
                            "seconds_of_one": round(expected[length][1], 2),
                        })  # fmt: skip
                        print(rows[-1], flush=True)
                    llm.shutdown()
    shape = {"layers": LAYERS, "heads": HEADS, "head_dim": DIM, "bytes_a_number": ITEM, "chunk": CHUNK}
    if given.output:
        result = {"commit": commit(), "hardware": hardware(), "shape": shape, "rows": rows}
        pathlib.Path(given.output).write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not all(row["equal_tokens"] and row["sent_bytes"] == row["formula_bytes"] for row in rows))


if __name__ == "__main__":
    main()
