"""Cases of linear layers with weights of 8 or 4 bits, on CPU: two matrices of a Qwen3 0.6B, against torch's product.

The limit is the time to read the packed weights: products of bytes are faster than the matmul that limits measure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F

from quire.bench.kernels.case import Case, Check, Contender, Setting
from quire.bench.kernels.limits import Work
from quire.bench.kernels.linear import LAYERS, LinearCase
from quire.kernels import catalog
from quire.kernels.qgemm import SCHEMES, PackedWeight, pack, reference

NAMES = ("0.6b qkv", "0.6b down")
ROWS = (1, 16)


def cases(op: str, setting: Setting) -> Iterator[Case]:
    """None on CUDA, which has no such kernels."""
    for scheme in SCHEMES if setting.device.type == "cpu" else ():
        for name in NAMES:
            layer = LAYERS[name].plain
            for m in ROWS:
                w_bytes = SCHEMES[scheme].bytes_per_weight * layer.n * layer.k
                work = Work(w_bytes + setting.element_bytes * m * layer.k, setting.element_bytes * m * layer.n)
                contenders = functools.partial(_contenders, scheme, layer, m, setting)
                is_quick = m == 16 and name == NAMES[0]
                yield Case(op, f"{name} {scheme}, {m} rows", work, contenders, scheme, quick=is_quick)


def checks(op: str, setting: Setting) -> Iterator[Check]:
    """Each scheme at a small size whose sides are no multiples of anything."""
    for scheme in SCHEMES:
        for implementation in catalog.runnable(op, setting.device.type):
            if implementation.name != "reference":
                error = functools.partial(_error, scheme, setting, implementation)
                yield Check(op, scheme, implementation.name, error, reference.TOLERANCE[setting.dtype])


def _weight(layer: LinearCase, setting: Setting) -> torch.Tensor:
    return setting.randn(layer.n, layer.k).mul_(layer.k**-0.5)


def _contenders(scheme: str, layer: LinearCase, m: int, setting: Setting) -> Iterable[Contender]:
    n_copies = setting.timer.n_copies(SCHEMES[scheme].bytes_per_weight * layer.n * layer.k)
    weights = [_weight(layer, setting) for _ in range(n_copies)]
    packed: list[PackedWeight] = [pack(weight, scheme) for weight in weights]
    x = setting.randn(m, layer.k)
    for implementation in catalog.runnable("qgemm", setting.device.type):
        if implementation.name != "reference":
            function = implementation.load().linear
            calls = [functools.partial(function, x, one) for one in packed]
            yield Contender(implementation.name, functools.partial(list, calls))
    yield Contender("torch", lambda: [functools.partial(F.linear, x, weight) for weight in weights], is_peer=True)


def _error(scheme: str, setting: Setting, implementation: catalog.Implementation) -> float:
    """Largest |got - reference| / (1 + |reference|)."""
    packed = pack(_weight(LinearCase(200, 330), setting), scheme)
    x, bias = setting.randn(7, 330), setting.randn(200)
    expected = reference.exact(x, packed, bias)
    got = implementation.load().linear(x, packed, bias).double()
    return float(((got - expected).abs() / (1 + expected.abs())).max())
