"""`quire kernels list | explain OP`: what can run on this machine, what would run for given inputs, and its source.

Works without a GPU: what depends on one is named as what would be checked there.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from quire.config.flags import add_flags, read_flags
from quire.core.errors import ConfigError, shown
from quire.core.spelling import did_you_mean_and_known

if TYPE_CHECKING:
    import torch

    from quire.bench.kernels.paged import Batch
    from quire.kernels.attention.schedule.plan import AttnPlan
    from quire.kernels.attention.variant import Variant

EXAMPLE_SPANS = ((700, 700), (4096, 1), (1500, 1), (300, 1), (9, 1))
"""(keys, rows): one prompt and four sequences that decode."""


class ExplainOptions(msgspec.Struct, kw_only=True):
    """Inputs of the op that is explained; all of them are for attention."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], Meta(description="Where it would run; auto: on the GPU if there is one.")
    ] = "auto"
    variant: Annotated[
        str,
        Meta(
            description="Variant with example parameters: causal, window, soft_cap, alibi, learned_sinks, "
            "sigmoid_attention, custom_mask, tree_mask, rotary."
        ),
    ] = "causal"
    head_dim: Annotated[int, Meta(description="Elements of a head.", ge=1)] = 128
    page_size: Annotated[int, Meta(description="Tokens of a page.", ge=1)] = 16
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Meta(description="Type of the tensors.")] = "bf16"
    q_heads: Annotated[int, Meta(description="Query heads.", ge=1)] = 32
    kv_heads: Annotated[int, Meta(description="Heads of keys and values.", ge=1)] = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the two commands."""
    kinds = parser.add_subparsers(title="commands", metavar="WHAT", required=True)
    meaning = "Every op and implementation, and why one cannot run here."
    kinds.add_parser("list", help=meaning, description=meaning).set_defaults(show=run_list)
    meaning = "What would run, why not the others, the program and source of a variant, an example plan."
    explain = kinds.add_parser("explain", help=meaning, description=meaning, usage="quire kernels explain OP [options]")
    explain.add_argument("op", metavar="OP", nargs="?", help="for instance attention; without it all are named")
    explain.set_defaults(show=run_explain)
    add_flags(explain, ExplainOptions, title="inputs of attention")


def run(namespace: argparse.Namespace) -> int:
    """Run the chosen command."""
    return int(namespace.show(namespace))


def run_list(namespace: argparse.Namespace) -> int:
    """`quire kernels list`."""
    from quire.kernels import catalog

    for op, meaning in catalog.OPS.items():
        print(f"{op}: {meaning}")
        width = 2 + max((len(entry.name) for entry in catalog.of(op)), default=9)
        for entry in catalog.of(op):
            state = entry.machine_obstacle()
            print(f"  {entry.name:<{width}}{'/'.join(entry.devices):<10}{'no: ' + state if state else 'available'}")
    print()
    for name, value in dataclasses.asdict(catalog.toolchain()).items():
        print(f"{name:<10}{value}")
    return 0


def run_explain(namespace: argparse.Namespace) -> int:
    """`quire kernels explain`."""
    options = read_flags(namespace, ExplainOptions)
    from quire.kernels import catalog

    if namespace.op is None:
        raise ConfigError(f"quire kernels explain needs an op: {', '.join(catalog.OPS)}.")
    if namespace.op not in catalog.OPS:
        hint = did_you_mean_and_known(namespace.op, catalog.OPS)
        raise ConfigError(f"{shown(namespace.op)} is not an op{hint}.")
    if namespace.op == "attention":
        lines = attention_lines(options)
    else:
        lines = op_lines(namespace.op, options.device)
    for line in lines:
        print(line)
    return 0


def op_lines(op: str, device: str) -> Iterator[str]:
    """An op's implementations in order of preference: the first that takes the inputs runs."""
    from quire.kernels import catalog

    yield f"{op}: {catalog.OPS[op]}"
    for entry in catalog.of(op, "" if device == "auto" else device):
        yield f"  {entry.name} ({entry.module}) on {' and '.join(entry.devices)}, needs {entry.needs}"
        obstacle = entry.machine_obstacle()
        yield f"    {', '.join(entry.functions)}: {f'cannot run here: {obstacle}' if obstacle else 'can run here'}"


def attention_lines(options: ExplainOptions) -> Iterator[str]:
    """Everything about one variant and shape of attention."""
    import torch

    from quire.bench.kernels.paged import Batch
    from quire.bench.kernels.session import DTYPES
    from quire.bench.kernels.variants import NAMED, SHORT, example
    from quire.kernels import catalog
    from quire.kernels.attention.schedule.plan import Heads

    if options.variant not in NAMED | SHORT:
        hint = did_you_mean_and_known(options.variant, NAMED | SHORT, NAMED)
        raise ConfigError(f"--variant {shown(options.variant)} is unknown{hint}.")
    no_gpu = catalog.cuda_obstacle()
    device = options.device if options.device != "auto" else "cpu" if no_gpu else "cuda"
    heads = Heads(options.q_heads, options.kv_heads, options.head_dim)
    batch = Batch(EXAMPLE_SPANS, heads=heads, page_size=options.page_size)
    place = torch.device("cpu" if no_gpu else device)
    variant = example(options.variant, batch, place)
    table = torch.from_numpy(batch.page_table()[0]).to(place)
    try:
        plan = batch.plan(table, variant)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    yield (
        f"attention, variant {options.variant}, {options.q_heads} query heads, {options.kv_heads} KV heads of "
        f"{options.head_dim} elements, pages of {options.page_size}, {options.dtype}, on {device}"
    )
    elsewhere = no_gpu if device == "cuda" else None
    found = _obstacles(plan, variant, DTYPES[options.dtype], device, elsewhere)
    yield from _choice_lines(found, elsewhere)
    yield from _title(f"Program {variant.program.digest()}")
    for line in variant.program.text().splitlines():
        yield f"{line}none" if line.endswith(": ") else line
    yield from _source_lines(variant, DTYPES[options.dtype], found)
    yield from _title("Plan of an example")
    yield from _plan_lines(batch, plan, device)


def _obstacles(
    plan: AttnPlan, variant: Variant, dtype: torch.dtype, device: str, no_gpu: str | None
) -> dict[str, str | None]:
    """Implementation → why it cannot run this, here or, where there is no GPU, on any; the best first."""
    from quire.kernels import catalog

    arguments = (plan, variant, dtype, dtype)
    return {
        entry.name: entry.static_obstacle(*arguments) if no_gpu else entry.obstacle(dtype, *arguments)
        for entry in catalog.selectable("attention", "run", device)
    }


def _choice_lines(found: dict[str, str | None], no_gpu: str | None) -> Iterator[str]:
    """Which implementation runs, and why not the others."""
    yield from _title("Implementations, in order of preference")
    runs = next((name for name, obstacle in found.items() if obstacle is None), None)
    after = f"could run, but {runs} is preferred"
    if no_gpu:
        yield f"There is {no_gpu}. On one:"
        after = f"runs where {runs} does not"
    for name, obstacle in found.items():
        able = "runs" if name == runs else after
        if name == "hopper" and no_gpu:
            able = "runs if the GPU has compute capability 9.0, nvcc is found and the build works"
        yield f"  {name}: {f'no: {obstacle}' if obstacle else able}"


def _source_lines(variant: Variant, dtype: torch.dtype, found: dict[str, str | None]) -> Iterator[str]:
    """What each implementation that can run this compiles for the variant."""
    from quire.kernels.attention.cpu import hooks as cpu_hooks
    from quire.kernels.attention.hopper import hooks as hopper_hooks

    if variant.built_in:
        yield from _title("Generated source")
        yield "none: plain attention is built in"
        return
    able = [name for name, obstacle in found.items() if obstacle is None]
    if "cpu" in able:
        yield from _title("C++ for the CPU")
        yield cpu_hooks.header(variant.program, dtype, dtype).rstrip()
    if "hopper" in able:
        yield from _title("CUDA C++ (hopper)")
        yield hopper_hooks.header(variant.program).rstrip()
    if "triton" in able:
        yield from _title("Triton")
        yield _triton_source(variant).rstrip()


def _triton_source(variant: Variant) -> str:
    from quire.kernels.attention.triton import hooks as triton_hooks

    return triton_hooks.source(variant.program)


def _plan_lines(batch: Batch, plan: AttnPlan, device: str) -> Iterator[str]:
    """The cutting of the example in words."""
    spans = ", ".join(f"{n} rows of {kv_len}" if n > 1 else f"1 row of {kv_len}" for kv_len, n in batch.spans)
    yield from textwrap.wrap(f"{len(batch.spans)} sequences (new rows of all keys): {spans}.", 118)
    if device == "cpu":
        yield f"{len(plan.work.tiles)} tiles of rows, the most expensive first; threads take them in turn."
        return
    from quire.kernels.attention.schedule import tiles, work

    n_ctas = plan.work.n_ctas if hasattr(plan.work, "n_ctas") else work.N_CTAS
    cut = tiles.cut(plan, n_ctas)
    busy = int((cut.queue[1:] > cut.queue[:-1]).sum())
    n_sequences = sum(length == 1 for _, length in batch.spans)
    yield (
        f"{len(cut.small)} small lines of work for {busy} of {n_ctas} CTAs: {n_sequences} decoding sequences x "
        f"{batch.heads.n_kv_heads} KV heads, cut where a CTA's share ends."
    )
    yield f"{len(cut.large)} large lines, each for all {batch.heads.n_kv_heads} KV heads, by falling cost."
    yield (
        f"{len(cut.merges)} rows were split over keys: {len(cut.parts)} partial results are merged, "
        f"{cut.n_partial_rows} rows of {batch.heads.head_dim} float32."
    )


def _title(text: str) -> Iterator[str]:
    yield ""
    yield f"--- {text} ---"
