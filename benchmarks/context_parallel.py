"""Ulysses against the ring by length of a prompt: time of the first token, and bytes that a rank sends.

    python -m benchmarks.context_parallel                                 # processes of a CPU, gloo, random models
    python -m benchmarks.context_parallel --device cuda --ranks 2 --lengths 8192,32768,131072

Whole engines; the default model is a random Llama of 8 heads and few of keys and values, on GPUs the 8B shape. What
rank 0 sends for attention is counted at its `Comm`, beside the formula by which the engine chooses (`planner/context`),
and seconds are beside the planner's expectation where the GPU is in its table. On a CPU the first tokens have to be
those of one rank, and bytes the formula's; ranks share its cores there, so that seconds say nothing of GPUs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from benchmarks.counted_calls import counted
from benchmarks.rank_engines import (
    DTYPES,
    SMALL_LLAMA,
    Row,
    engine,
    expected,
    model_folder,
    numbers,
    options_of,
    prompts_of,
    recording,
    say,
    took_s,
)
from quire import LLM, SamplingParams
from quire.config.arch import ModelArch
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.context import least_rows, ring_keys_bytes, ring_queries_bytes, ulysses_bytes
from quire.planner.cost import CostModel
from quire.planner.operators import prefill_spans

PAGE, N_OUT = 16, 8
CALLS = {"ulysses": "all-to-all", "ring": "send"}
BYTES = {"float32": 4, "bfloat16": 2}
LENGTHS = {"cpu": "2048,8192,32768", "cuda": "8192,32768,131072"}
CHUNK = {"cpu": 2048, "cuda": 8192}
COLUMNS = {
    "kv_heads": "kv heads", "ranks": "ranks", "method": "method", "tokens": "tokens", "seconds": "seconds",
    "expected_s": "planner s", "speedup": "of one rank", "sent_bytes": "bytes sent", "formula_bytes": "formula",
    "equal_tokens": "same tokens",
}  # fmt: skip


def formula(arch: ModelArch, method: str, n_tokens: int, n_ranks: int, device: str, chunk: int) -> float:
    """Bytes that a rank sends for attention, of a prompt in chunks."""
    (mixer,) = {layer.mixer for layer in arch.layers}
    kv, item, total = mixer.kv_spec, BYTES[DTYPES[device]], 0.0
    assert kv is not None
    for start in range(0, n_tokens, chunk):
        n = min(chunk, n_tokens - start)
        if n < least_rows(device, n_ranks):
            continue  # such a step is not divided
        rows = -(-n // n_ranks)
        if method == "ulysses":
            heads = mixer.n_heads // n_ranks
            own = heads + 2 * max(1, kv.n_kv_heads // n_ranks)
            total += ulysses_bytes(rows, own * kv.head_dim, heads * kv.head_dim, item, n_ranks)
        else:
            n_pages = -(-(start + n) // (PAGE * n_ranks))
            keys = ring_keys_bytes(n_pages * PAGE, 2 * kv.n_kv_heads * kv.head_dim * item, n_ranks)
            total += min(keys, ring_queries_bytes(rows, mixer.n_heads, kv.head_dim, kv.head_dim, item, n_ranks))
    return arch.n_layers * total


def first_tokens(llm: LLM, n_tokens: int) -> list[int]:
    """Of a prompt of so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=N_OUT, ignore_eos=True, detokenize=False)
    (found,) = llm.generate(prompts_of(1, n_tokens), params, use_tqdm=False)
    return list(found.outputs[0].token_ids)


def expected_s(folder: str, device: str, mesh: Mesh, n_tokens: int, chunk: int) -> float | None:
    """Until the first token, by the planner; None: it does not know this device."""
    cost = expected(folder, device, mesh)
    return None if cost is None else expected_steps_s(cost, n_tokens, chunk)


def expected_steps_s(cost: CostModel, n_tokens: int, chunk: int) -> float:
    """Of a prompt in chunks."""
    steps = (prefill_spans(min(chunk, n_tokens - start), start) for start in range(0, n_tokens, chunk))
    return sum(map(cost.step_s, steps)) + cost.first_token_s


def engine_rows(folder: str, options: argparse.Namespace, n_ranks: int, method: str) -> list[Row]:
    """Every length on one engine. method: '' of one rank."""
    device, lengths = options.device, numbers(options.lengths or LENGTHS[options.device])
    chunk, arch, rows = options.chunk or CHUNK[device], read_arch(pathlib.Path(folder)), list[Row]()
    given: dict[str, Any] = {"prefill_context_parallel_size": n_ranks, "context_parallel_method": method or "auto"}
    mesh = Mesh(sp=n_ranks) if method == "ulysses" else Mesh(ring=n_ranks)
    with counted() as counts:
        llm = engine(
            folder, device, max_num_batched_tokens=chunk, max_model_len=max(lengths) + 64, max_num_seqs=2,
            block_size=PAGE, hf_overrides={"max_position_embeddings": max(lengths) + 64},
            **(given if method else {}),
        )  # fmt: skip
        took_s(llm, prompts_of(1, min(lengths)), 2)
        for n in lengths:
            seconds = []
            for _ in range(options.rounds):
                counts.clear()
                seconds.append(took_s(llm, prompts_of(1, n), 1))
            sent = counts.sent[CALLS[method]] if method else 0
            row = {
                "kv_heads": arch.layers[0].mixer.kv_spec.n_kv_heads,  # type: ignore[union-attr]
                "ranks": n_ranks, "method": method or "one rank", "tokens": n, "seconds": min(seconds),
                "expected_s": expected_s(folder, device, mesh, n, chunk), "token_ids": first_tokens(llm, n),
            }  # fmt: skip
            if method:
                row["sent_bytes"] = sent
                row["formula_bytes"] = round(formula(arch, method, n, n_ranks, device, chunk))
            rows.append(row)
        llm.shutdown()
    return rows


def add_rows(folder: str, options: argparse.Namespace, rows: list[Row]) -> None:
    """One rank, then both methods on several."""
    alone = {row["tokens"]: row for row in engine_rows(folder, options, 1, "")}
    rows += alone.values()
    say(list(alone.values()), COLUMNS)
    for n_ranks in numbers(options.ranks):
        for method in CALLS:
            found = engine_rows(folder, options, n_ranks, method)
            for row in found:
                one = alone[row["tokens"]]
                row |= {
                    "equal_tokens": row["token_ids"] == one["token_ids"],
                    "speedup": one["seconds"] / row["seconds"],
                }
            say(found, COLUMNS)
            rows += found


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--lengths", default="", help=f"default: {LENGTHS['cuda']} on GPUs, {LENGTHS['cpu']} on a CPU")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--kv-heads", default="4,1", help="of the random model")
    parser.add_argument("--model", default="", help="default: shape:llama-3.1-8b on GPUs, a random one on a CPU")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, at most")
    parser.add_argument("--rounds", type=int, default=2, help="of which the fastest counts")
    options = parser.parse_args()
    model = options.model or ("shape:llama-3.1-8b" if options.device == "cuda" else "")
    models = [model] if model else [SMALL_LLAMA | {"num_key_value_heads": n} for n in numbers(options.kv_heads)]
    with recording("context_parallel", options, chunk=options.chunk or CHUNK[options.device]) as rows:
        for one in models:
            with model_folder(one) as folder:
                add_rows(folder, options, rows)
    divided = [row for row in rows if "formula_bytes" in row]
    as_said = [row for row in divided if row["sent_bytes"] == row["formula_bytes"]]
    equal = [row for row in divided if row["equal_tokens"]]
    print(f"of {len(divided)} runs {len(as_said)} sent what the formula says, and {len(equal)} gave one rank's tokens")
    sys.exit(options.device == "cpu" and not len(divided) == len(as_said) == len(equal))


if __name__ == "__main__":
    main()
