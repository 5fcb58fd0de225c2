"""Cases of sampling: one token from each row of logits, against plain torch (softmax, topk, sort, multinomial).

Logits are normal with deviation 3, flatter than a language model's: top-p has thousands of candidates, and half of all
tokens where it is hot.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from quire.bench.kernels.case import Case, Check, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.kernels import catalog
from quire.kernels.sample import Choice, Draw, reference
from quire.kernels.sample.draw import INVERSE, UNIFORM
from quire.kernels.transfer import upload

CONTROLS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "hot, top_p 0.9": {"temperature": 3.4, "top_p": 0.9},
    "hot, min_p 0.05": {"temperature": 3.4, "min_p": 0.05},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
    "top_k 50, top_p 0.9, min_p 0.05": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
}
QUICK = ("greedy", "top_k 20, top_p 0.8")
SIZES = {"cuda": [(1, 151936), (64, 151936), (256, 151936)], "cpu": [(16, 151936)]}
"""Rows and logits of each. The largest is part of a quick run."""
SMALL = (12, 1000)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """One case a size and kind of control."""
    sizes = SIZES[setting.device.type]
    for n_rows, width in sizes:
        for name, controls in CONTROLS.items():
            contenders = functools.partial(_contenders, setting, (n_rows, width), controls)
            is_quick = name in QUICK and (n_rows, width) == sizes[-1]
            work = Work(4.0 * n_rows * width)
            yield Case(op, f"{n_rows} x {width} {name}", work, contenders, name, quick=is_quick)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """How far the random number lies outside the chosen token's part of the float64 distribution."""
    for name, controls in CONTROLS.items():
        for implementation in catalog.runnable(op, setting.device.type):
            if implementation.name != "reference" and "choose_by" in implementation.functions:
                error = functools.partial(_error, setting, implementation, controls)
                yield Check(op, name, implementation.name, error, reference.TOLERANCE)


def draw(n_rows: int, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Draw:
    """The same controls for each row, seeded random numbers."""
    return Draw(
        temperature=np.full(n_rows, temperature, np.float32),
        uniform=np.random.default_rng(0).random(n_rows),
        top_k=np.full(n_rows, top_k, np.int32),
        top_p=np.full(n_rows, top_p, np.float32),
        min_p=np.full(n_rows, min_p, np.float32),
    )


def plain(
    logits: torch.Tensor, temperature: float = 0.7, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """What one writes without a sampling library."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if min_p:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p < 1:
        values, order = logits.sort(-1)
        dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
        logits = logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)


def _contenders(setting: Setting, shape: tuple[int, int], controls: dict[str, Any]) -> Iterable[Contender]:
    n_copies = setting.timer.n_copies(4 * shape[0] * shape[1])
    copies = [3 * setting.randn(*shape, dtype=torch.float32) for _ in range(n_copies)]
    lines = upload(draw(shape[0], **controls).controls(), setting.device)
    for implementation in catalog.runnable("sample", setting.device.type):
        if implementation.name != "reference" and "choose_by" in implementation.functions:
            choose_by = implementation.load().choose_by
            calls = [functools.partial(choose_by, logits, lines, _out(shape[0], setting)) for logits in copies]
            yield Contender(implementation.name, functools.partial(list, calls))
    others = [functools.partial(plain, logits, **controls) for logits in copies]
    yield Contender("torch", lambda: others, is_peer=True, capture=False)


def _out(n_rows: int, setting: Setting) -> Choice:
    ids = torch.zeros(n_rows, dtype=torch.int32, device=setting.device)
    return Choice(ids, torch.zeros(n_rows, dtype=torch.uint8, device=setting.device))


def _error(setting: Setting, implementation: catalog.Implementation, controls: dict[str, Any]) -> float:
    logits = 3 * setting.randn(*SMALL, dtype=torch.float32)
    lines, choice = draw(SMALL[0], **controls).controls(), _out(SMALL[0], setting)
    implementation.load().choose_by(logits, upload(lines, setting.device), choice)
    worst = 0.0
    for row, control, token in zip(logits.cpu().double(), lines.T, choice.token_ids.tolist(), strict=True):
        if control[INVERSE] == 0:
            worst = max(worst, float(row.max() - row[token]))
            continue
        cumulative = reference.distribution(row, control).cumsum(0)
        before, after = float(cumulative[token - 1]) if token else 0.0, float(cumulative[token])
        worst = max(worst, before - control[UNIFORM], control[UNIFORM] - after)
    return worst
