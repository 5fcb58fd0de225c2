"""Both products of experts of many rows on a GPU, ours beside others, on equal assignments.

    python -m benchmarks.grouped_product --output benchmarks/results/h200/grouped_product.json

`products` is the first with its activation and the second, without what brings rows into order and sums them: ours is
the whole op less the same calls without products. Others get their order beforehand: a product in Triton whose tiles
are chosen by a sweep at each size (`grouped_triton`), torch's grouped_mm on sorted rows; both with an activation of
their own. `op` is all of it: ours, and the op in Triton. Weights are read from memory, calls are captured, medians
count. Routing is even (experts in turn) or uniform at random.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
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
BUDGET_S: Final = 0.03
"""Of one form, and of a tile in a sweep a third."""
FLOPS: Final = 790e12
"""A second, and bytes that are read, of an H200 (docs/lab-notes.md): the limit is the longer of both."""
READ_BYTES: Final = 4.3e12


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

    def us(self, call: Callable[[torch.Tensor, torch.Tensor], object], budget_s: float = BUDGET_S) -> float:
        """Of a call that takes up and down."""
        calls: list[Call] = [functools.partial(call, *pair) for pair in self.matrices]
        return 1e6 * self.setting.timer.sample(calls, budget_s).median_s


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


def ours(given: Inputs) -> tuple[float, float]:
    """Microseconds of the products and of the op."""
    arguments = (given.x, given.expert_ids, given.weights)
    launch = hopper.prepare(*arguments, *given.matrices[0], SWIGLU)
    if isinstance(launch, str):
        raise SystemExit(f"our kernels do not run here: {launch}")
    around = dataclasses.replace(launch, products=(lambda *_: 0, lambda *_: 0))
    op_us, around_us = (given.us(lambda *pair, run=run: run(*arguments, *pair, SWIGLU)) for run in (launch, around))
    return op_us - around_us, op_us


def tuned_triton(given: Inputs) -> tuple[float, str]:
    """Microseconds of the products with the fastest tile for each, and these tiles."""
    k, n_pairs, product = given.shape.n_chosen, given.n_pairs, grouped_triton.product
    found: list[list[tuple[float, grouped_triton.Tile]]] = [[], []]
    inner = given.setting.randn(n_pairs, given.shape.inner)
    for bm in sorted({tile.bm for tile in grouped_triton.TILES}):
        if not n_pairs / 8 <= bm * given.shape.n_experts <= 4 * n_pairs:
            continue  # too small, or mostly padding
        pairs = grouped_triton.Padded.of(given.expert_ids, given.shape.n_experts, bm)
        for tile in (one for one in grouped_triton.TILES if one.bm == bm):
            up_us = given.us(lambda up, _, p=pairs, t=tile: product(given.x, up, p, k, t, n_pairs), BUDGET_S / 3)
            down_us = given.us(lambda _, down, p=pairs, t=tile: product(inner, down, p, 1, t, n_pairs), BUDGET_S / 3)
            found[0].append((up_us, tile)), found[1].append((down_us, tile))
    tiles = [min(one, key=lambda each: each[0])[1] for one in found]
    orders = [grouped_triton.Padded.of(given.expert_ids, given.shape.n_experts, tile.bm) for tile in tiles]

    def call(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        both = product(given.x, up, orders[0], k, tiles[0], n_pairs)
        return product(grouped_triton.silu(both), down, orders[1], 1, tiles[1], n_pairs)

    return given.us(call), "; ".join(str(dataclasses.astuple(tile)) for tile in tiles)


def grouped_mm(given: Inputs) -> float:
    """Microseconds of torch's products of sorted rows, with the activation between them."""
    flat = given.expert_ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=given.shape.n_experts).cumsum(0).int()
    rows = given.x[order // given.shape.n_chosen]

    def call(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        both = torch._grouped_mm(rows, up.transpose(1, 2), offs=ends)
        return torch._grouped_mm(grouped_triton.silu(both), down.transpose(1, 2), offs=ends)

    return given.us(call)


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
    products_us, op_us = ours(given)
    triton_us, tiles = tuned_triton(given)
    arguments = (given.x, given.expert_ids, given.weights)
    times = {
        "ours_products_us": products_us, "triton_products_us": triton_us, "torch_products_us": grouped_mm(given),
        "ours_op_us": op_us, "triton_op_us": given.us(lambda *pair: triton.experts(*arguments, *pair, SWIGLU)),
        "limit_us": 1e6 * max(flops / FLOPS, n_bytes / READ_BYTES),
    }  # fmt: skip
    row = {"shape": name, "rows": n, "routing": routing, **{key: round(us, 1) for key, us in times.items()}}
    rates = {key.replace("_us", "_tflops"): round(flops / us / 1e6) for key, us in times.items() if "products" in key}
    return {**row, **rates, "triton_tiles": tiles}


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
    setting, rows = Setting(timer("cuda"), torch.bfloat16), []
    for row in rows_of(options, setting):
        rows.append(row)
        say(json.dumps(row))
    head = {
        "benchmark": "grouped products", "command": "python -m benchmarks.grouped_product", "commit": commit(),
        "hardware": setting.timer.name, "packages": package_versions(),
    }  # fmt: skip
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    options.output.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
