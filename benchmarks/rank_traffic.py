"""How often ranks speak in a step, and how many bytes each sends: counted in a running engine, beside `quire plan`.

    python -m benchmarks.rank_traffic                                     # two processes, gloo
    python -m benchmarks.rank_traffic --device cuda --ranks 2 --model shape:llama-3.1-8b

Rank 0's calls are counted at its `Comm` in a step of a prompt and in a decode step. The formula is the planner's
(`planner/communication`): two all-reduces a layer and one of the embedding, one gathering of logits; rows to experts
where these are divided among data-parallel ranks. With gloo also what its sockets sent. Steps are not captured.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

from benchmarks.counted_calls import Counts, counted, wire_bytes
from benchmarks.rank_engines import (
    DTYPES,
    SMALL_EXPERTS,
    SMALL_LLAMA,
    Row,
    engine,
    model_folder,
    numbers,
    options_of,
    prompts_of,
    recording,
    say,
    took_s,
)
from quire import LLM
from quire.config.mesh import Mesh
from quire.config.model import read_arch
from quire.planner.communication import step_transfers
from quire.planner.formats import formats_named
from quire.planner.parts import rank_parts

COLUMNS = {
    "case": "case", "step": "step", "rows": "rows", "what": "what", "calls": "calls", "formula_calls": "formula",
    "layer_calls": "a layer", "bytes": "bytes sent", "formula_bytes": "formula ", "wire_bytes": "by sockets",
}  # fmt: skip
N_DECODES = 8
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor parallel": (SMALL_LLAMA, {"tensor_parallel_size": 1}),
    "tensor parallel, experts": (SMALL_EXPERTS, {"tensor_parallel_size": 1}),
    "tensor parallel, experts apart": (SMALL_EXPERTS, {"tensor_parallel_size": 1, "enable_expert_parallel": True}),
    "stages": (SMALL_LLAMA, {"pipeline_parallel_size": 1}),
    "data parallel, experts apart": (SMALL_EXPERTS, {"data_parallel_size": 1, "enable_expert_parallel": True}),
}
"""Name → model, and options in which 1 stands for the number of ranks."""


def counted_step(llm: LLM, counts: Counts, n_seqs: int, n_rows: int, n_out: int) -> tuple[Counts, int]:
    """All steps of n_seqs prompts with n_out tokens each: calls of rank 0, and what its sockets sent."""
    counts.clear()
    before = wire_bytes()
    took_s(llm, prompts_of(n_seqs, n_rows), n_out)
    found = Counts()
    found.calls, found.sent = collections.Counter(counts.calls), collections.Counter(counts.sent)
    return found, wire_bytes() - before


def rows_of(case: str, step: str, found: Counts, wire: int, times: int, n_rows: int, formula: Row) -> list[Row]:
    """One for each kind of call; the last has all bytes."""
    rows = []
    for what in sorted(found.calls.keys() | formula["calls"].keys()):
        calls, sent = found.calls[what] / times, found.sent[what] / times
        rows.append({
            "case": case, "step": step, "rows": n_rows, "what": what, "calls": calls,
            "formula_calls": float(formula["calls"][what]), "layer_calls": round(calls / formula["layers"], 3),
            "bytes": round(sent), "formula_bytes": round(formula["bytes"][what]),
        })  # fmt: skip
    total = {"case": case, "step": step, "rows": n_rows, "what": "all", "calls": sum(found.calls.values()) / times,
             "formula_calls": float(sum(formula["calls"].values())), "bytes": round(sum(found.sent.values()) / times),
             "formula_bytes": round(sum(formula["bytes"].values()))}  # fmt: skip
    if wire:
        total["wire_bytes"] = round(wire / times)
    return [*rows, total]


def formula_of(folder: str, mesh: Mesh, dtype: str, n_rows: int, n_wants: int) -> Row:
    """Calls and bytes of one rank, by kind of call; n_rows, n_wants: of a data-parallel rank."""
    arch, formats = read_arch(pathlib.Path(folder)), formats_named(dtype, dtype, dtype)
    calls: collections.Counter[str] = collections.Counter()
    sent: collections.Counter[str] = collections.Counter()
    for one in step_transfers(rank_parts(arch, mesh, formats), mesh, n_rows, n_wants, formats.itemsize):
        calls[one.pattern.value] += one.n_times
        sent[one.pattern.value] += round(one.n_times * one.n_bytes)
    return {"calls": calls, "bytes": sent, "layers": arch.n_layers}


def case_rows(case: str, model: Any, options: Row, n_ranks: int, device: str, n_prompt: int) -> list[Row]:
    """A step of prompts, and a decode step, in the mean of several."""
    given = {name: n_ranks if value == 1 and value is not True else value for name, value in options.items()}
    dp = given.get("data_parallel_size", 1)
    mesh = Mesh(
        tp=given.get("tensor_parallel_size", 1), pp=given.get("pipeline_parallel_size", 1), dp=dp,
        ep=n_ranks if "enable_expert_parallel" in given else 1,
    )  # fmt: skip
    with model_folder(model) as folder, counted() as counts:
        llm = engine(folder, device, max_model_len=4096, max_num_seqs=8, enforce_eager=True, **given)
        took_s(llm, prompts_of(dp, n_prompt), 2)
        prompt, wire = counted_step(llm, counts, dp, n_prompt, 1)
        more, more_wire = counted_step(llm, counts, dp, n_prompt, 1 + N_DECODES)
        llm.shutdown()
        more.calls.subtract(prompt.calls)
        more.sent.subtract(prompt.sent)
        dtype = DTYPES[device]
        found = rows_of(case, "prompt", prompt, wire, 1, n_prompt, formula_of(folder, mesh, dtype, n_prompt, 1))
        decode = formula_of(folder, mesh, dtype, 1, 1)
        return found + rows_of(case, "decode", more, more_wire - wire, N_DECODES, 1, decode)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--ranks", default="2", help="numbers of ranks, such as 2,4")
    parser.add_argument("--model", default="", help="of tensor parallel; default: a random one of 2 layers")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, which is one step")
    options = parser.parse_args()
    with recording("rank_traffic", options) as rows:
        for n_ranks in numbers(options.ranks):
            for case, (model, given) in CASES.items():
                chosen = options.model if options.model and model is SMALL_LLAMA else model
                found = case_rows(f"{case}, {n_ranks}", chosen, given, n_ranks, options.device, options.prompt)
                say(found, COLUMNS)
                rows += found
    names = (("calls", "formula_calls"), ("bytes", "formula_bytes"))
    differ = [row for row in rows if any(row[counted] != row[said] for counted, said in names)]
    print(f"{len(rows) - len(differ)} of {len(rows)} lines have as many calls and bytes as the formula says")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
