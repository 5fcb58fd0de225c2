"""Checks of mixtures of experts: one for each case; of products with fewer experts, and as many rows fewer.

Sizes of an expert and the mean of its rows are those of the case, so that the kernels are those that are timed. Experts
are chosen at random, and one choice is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from quire.bench.kernels import experts
from quire.bench.kernels.case import Check, Setting
from quire.bench.kernels.experts import IN_E4M3, PACKED, Arguments, Entry, Shape
from quire.config.experts import Gating
from quire.kernels import catalog, qgemm
from quire.kernels.moe import CodedMatrices, PackedExperts, reference

N_TIMES = 2
"""Experts of a check, in those of a token."""
SIDES = {"cuda": 1, "cpu": 4}
"""Kernels on a GPU are compiled for the sizes of an expert. A CPU's loop over them: so many times smaller ones do."""
NEXT_CODE = 5e-3
"""An error of rounded experts in any type: a CPU rounds inner vectors to 8 bits, and the last digit of a sum may move a
number of one to its next code, a 127th of the largest."""
CLAMPED = "clamped"
"""A check that is no case's: biased gates, as of gpt-oss, and sizes of no known model."""
CLAMPED_SHAPE, CLAMPED_ROWS, CLAMPED_GATING = Shape(5, 3, 192, 64), 300, Gating(slope=1.7, offset=1.0, limit=2.0)


def smaller(shape: Shape, n: int, device_type: str) -> tuple[Shape, int]:
    """What a check has in place of this shape and n rows."""
    n_experts, side = min(shape.n_experts, N_TIMES * shape.n_chosen), SIDES[device_type]
    n_rows = n if n == 1 else max(2, n * n_experts // shape.n_experts)
    return Shape(n_experts, shape.n_chosen, shape.hidden // side, shape.inner // side), n_rows


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """One for each case and implementation of ours, named as the case."""
    for implementation in catalog.runnable(op, setting.device.type):
        if implementation.name == "reference":
            continue
        for entry in experts.entries(setting):
            if entry.function in implementation.functions:
                error, allowed = _compared(entry, setting)
                found = functools.partial(error, implementation)
                yield Check(op, entry.name, implementation.name, found, allowed, entry.quick)
        if "experts" in implementation.functions:
            make = functools.partial(experts.products, CLAMPED_SHAPE, CLAMPED_ROWS, setting, CLAMPED_GATING)
            found = functools.partial(_of_products, "experts", make, implementation)
            yield Check(op, CLAMPED, implementation.name, found, reference.TOLERANCE[setting.dtype])


def _compared(entry: Entry, setting: Setting) -> tuple[Callable[[catalog.Implementation], float], float]:
    """(the error of an implementation, what is allowed)."""
    if entry.function in ("route", "choose"):
        make = functools.partial(entry.make, entry.shape, entry.n, setting)
        return functools.partial(_of_choice, entry.function, make), reference.ROUTE_TOLERANCE
    make = functools.partial(entry.make, *smaller(entry.shape, entry.n, setting.device.type), setting)
    allowed = reference.ROUNDED_NORM if entry.form in IN_E4M3 else reference.TOLERANCE[setting.dtype]
    if entry.form == PACKED:
        allowed = max(allowed, NEXT_CODE)
    return functools.partial(_of_products, entry.function, make), allowed


def _of_products(function: str, make: Callable[[], Arguments], implementation: catalog.Implementation) -> float:
    """Largest |got - reference| / (1 + |reference|), in units of the results' deviation where that is more than 1; of
    rows in e4m3 |got - reference| / |reference| of all, or half of the worst row's."""
    given = make()
    x, expert_ids, weights, up = given[:4]
    n_experts = len(up.up) if isinstance(up, PackedExperts) else up.shape[0]
    expert_ids.copy_(torch.rand(len(x), n_experts, device=x.device).argsort(1)[:, : expert_ids.shape[1]])
    expert_ids[0, 0] = -1
    weights.uniform_(0.5, 1.5)
    if function == "experts_with_shared":
        given[-1].normal_()  # the residual
    expected = _exact(function, given)
    found = experts.function_of(implementation, function, given)(*given).double() - expected
    if _rounds(up):
        of_row = (found.norm(dim=1) / expected.norm(dim=1)).max()
        return max(float(found.norm() / expected.norm()), float(of_row) / 2)
    return float((found.abs() / (1 + expected.abs())).max()) / max(1.0, float(expected.std()))


def _rounds(up: object) -> bool:
    return isinstance(up, CodedMatrices) and up.rounds_inputs


def _exact(function: str, given: Arguments) -> torch.Tensor:
    """What the reference makes of it, in float64; nothing of `given` changes."""
    if function == "packed_experts" and given[3].up[0].scheme not in qgemm.SCHEMES:
        return _exact("experts", experts.unpacked(*given))
    if function == "packed_experts":
        return reference.packed_experts(*given).double()
    if function == "experts" and _rounds(given[3]):  # from x's own dtype
        x, expert_ids, weights, up, down, gating = given
        into = torch.empty_like(x, dtype=torch.float64)
        return reference.experts(x, expert_ids, weights, up, down, gating, out=into)
    given = (given[0].double(), *given[1:])
    if function == "experts_with_shared":
        given = (*given[:-1], given[-1].double())
    exact: torch.Tensor = getattr(reference, function)(*given)
    return exact


def _of_choice(function: str, make: Callable[[], Arguments], implementation: catalog.Implementation) -> float:
    """Largest error of a weight: of the best ones in order, and of each for the expert that it is said to be of.

    Experts whose scores differ by less than a rounding may stand for each other. 1 where an expert is chosen twice.
    """
    given = make()
    ids, weights = experts.function_of(implementation, function, given)(*given)
    if function == "choose":
        x, router, _, routing, *_ = given
        logits = x.double() @ router.double().T
    else:
        logits, routing = given[0].double(), given[1]
    _, expected = reference.route(logits, routing, None)
    scores = logits.softmax(-1).gather(1, ids.long())
    own = scores / scores.sum(-1, keepdim=True) if routing.renormalise else scores
    if any(len(set(row)) < len(row) for row in ids.tolist()):
        return 1.0
    return max(float((weights.double() - one).abs().max()) for one in (expected, own))
