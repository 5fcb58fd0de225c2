"""Whether hooks can read a tensor parameter out of bounds: intervals of every index, from what a plan can ask.

Owns interval arithmetic over expressions. Does not know the values inside integer tensors: an index made from those is
not judged. Invariant: an index that is accepted is inside the tensor for every real row and key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.kernels.attention.schedule.plan import AttnPlan
from quire.kernels.attention.variant import Variant
from quire.kernels.attention.variant.expression import Expr

Interval = tuple[float, float]
UNKNOWN: Interval = (float("-inf"), float("inf"))


def check(variant: Variant, plan: AttnPlan) -> None:
    """Raises ValueError with the index, its range and the tensor's size. Cheap when the variant has no tensors."""
    if not variant.tensors:
        return
    longest = int(plan.spans.kv_lens.max(initial=1))
    heads = plan.heads
    sizes = {
        "q_row": plan.n_rows,
        "q_pos": longest,
        "k_pos": longest,
        "q_head": heads.n_q_heads,
        "kv_head": heads.n_kv_heads,
        "dim": heads.head_dim,
    }
    known: dict[tuple[str, str], Interval] = {("site", name): (0, max(size - 1, 0)) for name, size in sizes.items()}
    known |= {("scalar", name): (value, value) for name, value in variant.scalars.items()}
    for hook, expr in variant.program.hooks.items():
        for name, (low, high) in _indices(expr, known).items():
            size = variant.tensors[name].numel()
            if low < 0 or high >= size:
                raise ValueError(
                    f"{hook} may read p.{name}[{low:.0f} .. {high:.0f}], but {name!r} has {size} elements (rows to "
                    f"{plan.n_rows}, positions to {longest}, {heads}): make it larger or clamp the index"
                )


def _indices(expr: Expr, known: Mapping[tuple[str, str], Interval]) -> dict[str, Interval]:
    """Tensor → smallest and largest index that is read; tensors whose index cannot be judged are absent."""
    values: dict[int, Interval] = {}
    found: dict[str, Interval] = {}
    for node in expr.walk():
        args = [values[id(arg)] for arg in node.args]
        values[id(node)] = _interval(node, args, known)
        if node.op == "load" and args[0] != UNKNOWN:
            low, high = found.get(node.name, args[0])
            found[node.name] = (min(low, args[0][0]), max(high, args[0][1]))
    return found


_RULES: Mapping[str, Callable[[Interval, Interval], Interval]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "floordiv": lambda a, b: (a[0] // b[1], a[1] // b[0]),
    "mod": lambda a, b: (0, min(a[1], b[1] - 1)),
}


def _interval(node: Expr, args: list[Interval], known: Mapping[tuple[str, str], Interval]) -> Interval:
    if node.op == "const" and node.kind == "int":
        return (int(node.name), int(node.name))
    if node.op in ("site", "scalar"):
        return known.get((node.op, node.name), UNKNOWN)
    if node.op == "where":
        return (min(args[1][0], args[2][0]), max(args[1][1], args[2][1]))
    if node.op == "mul" and UNKNOWN not in args:
        corners = [x * y for x in args[0] for y in args[1]]
        return (min(corners), max(corners))
    if node.op in ("minimum", "maximum"):
        return _RULES[node.op](*args)
    return _RULES[node.op](*args) if node.op in _RULES and UNKNOWN not in args else UNKNOWN
