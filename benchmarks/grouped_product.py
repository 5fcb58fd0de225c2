"""Both products of experts of many rows on a GPU, ours beside others, on equal assignments.

    python -m benchmarks.grouped_product --output benchmarks/results/h200/grouped_product.json

`products` is the first with its activation and the second, without what brings rows into order and sums them: ours is
the whole op less the same calls without products. Others get their order beforehand: a product in Triton whose tiles
are chosen by a sweep at each size (`grouped_triton`), torch's grouped_mm on sorted rows; both with an activation of
their own. `op` is all of it: ours, and the op in Triton. Routing is even (experts in turn) or uniform at random.

Weights are read from memory, calls are captured and timed in turns, medians count. Twice: `rested`, each with a pause
before it, when the chip runs at its full clock; and `going_on`, without, when it is at its limit of power and slower,
and an earlier form warms it for the next. What a file has of other sizes stays.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from benchmarks import grouped_triton
from quire.bench.kernels.case import Setting
from quire.bench.kernels.experts import SHAPES, Shape
from quire.bench.kernels.timing import Call, timer
from quire.bench.machine import commit, package_versions
from quire.kernels.moe import SWIGLU, hopper, triton

ROWS: Final = (256, 512, 1024, 2048, 4096, 8192)
ROUTINGS: Final = ("even", "uniform")
SWEEP_S: Final = 0.01
"""Of a tile in a sweep."""
TURNS: Final = 9
REST_S: Final = 0.02
"""The pause before a form that is timed rested."""
FLOPS: Final = 790e12
"""A second, and bytes that are read, of an H200 (docs/lab-notes.md): the limit is the longer of both."""
READ_BYTES: Final = 4.3e12


Product = Callable[[torch.Tensor, torch.Tensor], object]
"""Of up and down."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Of one call, but for matrices, of which there are several copies."""

    setting: Setting
    shape: Shape
    x: torch.Tensor
    expert_ids: torch.Tensor
    weights: torch.Tensor
    matrices: list[tuple[torch.Tensor, torch.Tensor]]
    """Up and down."""

    @property
    def n_pairs(self) -> int:
        return self.expert_ids.numel()

    def us(self, call: Product) -> float:
        """Microseconds of a call, alone."""
        calls: list[Call] = [functools.partial(call, *pair) for pair in self.matrices]
        return 1e6 * self.setting.timer.sample(calls, SWEEP_S).median_s

    def captured(self, call: Product) -> torch.cuda.CUDAGraph:
        """With each pair of matrices once."""
        for pair in self.matrices:
            call(*pair)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for pair in self.matrices:
                call(*pair)
        return graph


def matrices_of(shape: Shape, setting: Setting) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Enough that none is found in the cache."""
    n_copies = setting.timer.n_copies(setting.element_bytes * shape.numbers * shape.n_experts)
    sizes = ((2 * shape.inner, shape.hidden), (shape.hidden, shape.inner))
    pairs = ([setting.randn(shape.n_experts, *size).mul_(size[1] ** -0.5) for size in sizes] for _ in range(n_copies))
    return [(up, down) for up, down in pairs]


def inputs(shape: Shape, n: int, routing: str, setting: Setting, matrices: list[Any]) -> Inputs:
    """n tokens."""
    device, k = setting.device, shape.n_chosen
    if routing == "even":
        ids = (torch.arange(n * k, device=device) % shape.n_experts).view(n, k)
    else:
        ids = torch.rand(n, shape.n_experts, device=device).argsort(1)[:, :k]
    weights = torch.full((n, k), 1 / k, device=device)
    return Inputs(setting, shape, setting.randn(n, shape.hidden), ids.int().contiguous(), weights, matrices)


def in_turns(forms: dict[str, Product], given: Inputs) -> dict[str, dict[str, float]]:
    """Microseconds of each form: rested, and going on."""
    graphs = {name: given.captured(call) for name, call in forms.items()}
    found = {}
    for state, rest_s in (("rested", REST_S), ("going_on", 0.0)):
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        for _ in range(TURNS if rest_s else 4 * TURNS):
            for name, graph in graphs.items():
                if rest_s:
                    torch.cuda.synchronize()
                    time.sleep(rest_s)
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                graph.replay()  # what ran before has left its own in the cache
                pair[0].record()
                graph.replay()
                pair[1].record()
                events[name].append(pair)
        torch.cuda.synchronize()
        us = {name: [1e3 * a.elapsed_time(b) / len(given.matrices) for a, b in own] for name, own in events.items()}
        found[state] = {name: statistics.median(times[len(times) // 4 :]) for name, times in us.items()}
    return found


def ours(given: Inputs) -> tuple[Product, Product]:
    """The op, and it without products."""
    arguments = (given.x, given.expert_ids, given.weights)
    launch = hopper.prepare(*arguments, *given.matrices[0], SWIGLU)
    if isinstance(launch, str):
        raise SystemExit(f"our kernels do not run here: {launch}")
    around = dataclasses.replace(launch, products=(lambda *_: 0, lambda *_: 0))

    def call(run: hopper.Launch, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return run(*arguments, up, down, SWIGLU)

    return functools.partial(call, launch), functools.partial(call, around)


def tuned_triton(given: Inputs) -> tuple[Product, str]:
    """The products with the fastest tile for each, and these tiles."""
    k, n_pairs, product = given.shape.n_chosen, given.n_pairs, grouped_triton.product
    found: list[list[tuple[float, grouped_triton.Tile]]] = [[], []]
    inner = given.setting.randn(n_pairs, given.shape.inner)

    def first(pairs: grouped_triton.Padded, tile: grouped_triton.Tile, up: torch.Tensor, _: torch.Tensor) -> None:
        product(given.x, up, pairs, k, tile, n_pairs)

    def second(pairs: grouped_triton.Padded, tile: grouped_triton.Tile, _: torch.Tensor, down: torch.Tensor) -> None:
        product(inner, down, pairs, 1, tile, n_pairs)

    for bm in sorted({tile.bm for tile in grouped_triton.TILES}):
        if not n_pairs / 8 <= bm * given.shape.n_experts <= 4 * n_pairs:
            continue  # too small, or mostly padding
        pairs = grouped_triton.Padded.of(given.expert_ids, given.shape.n_experts, bm)
        for tile in (one for one in grouped_triton.TILES if one.bm == bm):
            for which, one in zip(found, (first, second), strict=True):
                which.append((given.us(functools.partial(one, pairs, tile)), tile))
    tiles = [min(one, key=lambda each: each[0])[1] for one in found]
    orders = [grouped_triton.Padded.of(given.expert_ids, given.shape.n_experts, tile.bm) for tile in tiles]

    def call(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        both = product(given.x, up, orders[0], k, tiles[0], n_pairs)
        return product(grouped_triton.silu(both), down, orders[1], 1, tiles[1], n_pairs)

    return call, "; ".join(str(dataclasses.astuple(tile)) for tile in tiles)


def grouped_mm(given: Inputs) -> Product:
    """Torch's products of sorted rows, with the activation between them."""
    flat = given.expert_ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=given.shape.n_experts).cumsum(0).int()
    rows = given.x[order // given.shape.n_chosen]

    def call(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        both = torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(grouped_triton.silu(both), down.transpose(1, 2), offs=ends)

    return call


def check(given: Inputs) -> None:
    """That all give about the same. Raises SystemExit."""
    (up, down), k, n_pairs, tile = given.matrices[0], given.shape.n_chosen, given.n_pairs, grouped_triton.TILES[0]
    pairs = grouped_triton.Padded.of(given.expert_ids, given.shape.n_experts, tile.bm)
    both = grouped_triton.product(given.x, up, pairs, k, tile, n_pairs)
    each = grouped_triton.product(grouped_triton.silu(both), down, pairs, 1, tile, n_pairs)
    wanted = (each.view(-1, k, given.shape.hidden).float() * given.weights[:, :, None]).sum(1)
    for name, run in (("ours", hopper.experts), ("the op in Triton", triton.experts)):
        got = run(given.x, given.expert_ids, given.weights, up, down, SWIGLU).float()
        error = float((got - wanted).norm() / wanted.norm())
        if not error < 0.01:
            raise SystemExit(f"{name} differs from the peer by {error:.3f} at {len(given.x)} rows: nothing was timed")


def measured(name: str, n: int, routing: str, setting: Setting, matrices: list[Any]) -> dict[str, Any]:
    """A row of the file."""
    shape = SHAPES[name]
    given = inputs(shape, n, routing, setting, matrices)
    check(given)
    flops = 2.0 * given.n_pairs * shape.numbers
    n_bytes = float(setting.element_bytes * shape.numbers * min(shape.n_experts, given.n_pairs))
    op, around = ours(given)
    triton_products, tiles = tuned_triton(given)
    triton_op = functools.partial(triton.experts, given.x, given.expert_ids, given.weights, gating=SWIGLU)
    forms: dict[str, Product] = {
        "ours_op": op, "around": around, "triton_products": triton_products, "torch_products": grouped_mm(given),
        "triton_op": triton_op,
    }  # fmt: skip
    row: dict[str, Any] = {"shape": name, "rows": n, "routing": routing}
    for state, us in in_turns(forms, given).items():
        us["ours_products"] = us["ours_op"] - us.pop("around")
        row[f"{state}_us"] = {form: round(us[form], 1) for form in sorted(us)}
        row[f"{state}_tflops"] = {form: round(flops / us[form] / 1e6) for form in sorted(us)}
    return {**row, "limit_us": round(1e6 * max(flops / FLOPS, n_bytes / READ_BYTES), 1), "triton_tiles": tiles}


def rows_of(options: argparse.Namespace, setting: Setting) -> Iterator[dict[str, Any]]:
    """Of all sizes and routings that are asked for."""
    for name in options.shapes:
        matrices = matrices_of(SHAPES[name], setting)
        for n in options.rows:
            for routing in options.routings:
                yield measured(name, n, routing, setting, matrices)
        del matrices
        setting.timer.release()


def main(say: Callable[[str], None] = print) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-30b-a3b"])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    setting = Setting(timer("cuda"), torch.bfloat16)
    rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for row in rows_of(options, setting):
        rows = [one for one in rows if any(one[key] != row[key] for key in ("shape", "rows", "routing"))] + [row]
        write(options.output, rows, setting.timer.name)
        say(json.dumps(row))


def write(path: pathlib.Path, rows: list[dict[str, Any]], hardware: str) -> None:
    """A line for each row."""
    head = {
        "benchmark": "grouped products", "command": "python -m benchmarks.grouped_product", "commit": commit(),
        "hardware": hardware, "packages": package_versions(),
    }  # fmt: skip
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
