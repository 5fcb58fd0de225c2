"""Cases of attention: decode, prefill, mixed batches, shared prefixes, variants, other shapes, the host's plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

import numpy as np
import torch

from quire.bench.kernels import peers
from quire.bench.kernels.case import Case, Contender, NotRun, Setting
from quire.bench.kernels.paged import LLAMA, Batch, Inputs, lognormal
from quire.bench.kernels.timing import Call
from quire.bench.kernels.variants import SHORT, example
from quire.kernels import catalog
from quire.kernels.attention import op
from quire.kernels.attention.schedule.plan import AttnPlan, Heads
from quire.kernels.attention.variant import Variant

QWEN = Heads(16, 8, 128)
MEASURED_VARIANTS = ("soft_cap", "window", "sinks", "sigmoid", "alibi", "mask")
PAGE = 16
"""Of most cases."""
PLAN_SPANS = 256
MAX_LARGE = 1024
SMALL_SPANS = ((300, 1), (77, 77))


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCase:
    """One line of the list of cases."""

    name: str
    batch: Batch
    variant: str = "causal"
    baseline: str = ""
    quick: bool = False
    peers: bool = True

    @property
    def in_flops(self) -> bool:
        return bool(self.batch.lengths.max() > 16)

    @property
    def kind(self) -> str:
        """Name of the check of its variant, and of how its keys lie where that is not as most do."""
        batch, heads = self.batch, self.batch.heads
        variant = SHORT.get(self.variant, self.variant) if not batch.coded else self.variant
        more = {
            " e4m3": batch.coded,
            " ragged": batch.ragged,
            " shared": batch.n_shared > 0 and batch.tell_shared,
            f", page {batch.page_size}": batch.page_size != PAGE,
            f", heads {_named(heads)}": heads not in (LLAMA, QWEN),
        }
        return variant + "".join(text for text, holds in more.items() if holds)

    def make_variant(self, device: torch.device) -> Variant:
        """With example parameters. A custom mask stands beside causal, so that times can be compared."""
        return dataclasses.replace(example(self.variant, self.batch, device), causal=True)


def cases(op_name: str, setting: Setting) -> Iterator[Case]:
    """All cases of the setting's device, the most important first."""
    for entry in cases_of(setting.device.type):
        yield Case(
            op_name,
            entry.name,
            entry.batch.work(entry.make_variant(torch.device("cpu")), setting.element_bytes),
            functools.partial(_contenders, entry, setting),
            entry.kind,
            in_flops=entry.in_flops,
            baseline=entry.baseline,
            quick=entry.quick,
            prepare=functools.partial(_prepare, entry, setting),
            prepare_key=(entry.variant, dataclasses.replace(entry.batch, spans=(), n_shared=0)),
        )
    yield Case(op_name, f"plan {PLAN_SPANS} mixed sequences", None, functools.partial(_planners, setting), quick=True)


def cases_of(device_type: str) -> list[AttentionCase]:
    """The cases on a device."""
    return cuda_cases() if device_type == "cuda" else cpu_cases()


def cuda_cases() -> list[AttentionCase]:
    """The cases on a GPU."""
    quick = ("64 x 4k", "1 x 4k")
    found = [
        AttentionCase(f"decode {b} x {k}k", Batch(((1024 * k, 1),) * b), quick=f"{b} x {k}k" in quick)
        for b in (1, 16, 64, 256)
        for k in (1, 4, 16)
    ]
    found += [
        AttentionCase(
            f"decode {b} x 4k e4m3",
            Batch(((4096, 1),) * b, coded=True),
            baseline=f"decode {b} x 4k",
            quick=b == 64,
            peers=False,
        )
        for b in (1, 16, 64, 256)
    ]
    found.append(
        AttentionCase("prefill 4k e4m3", Batch(((4096, 4096),), coded=True), baseline="prefill 4k", peers=False)
    )
    found += [
        AttentionCase(f"prefill {k}k{' ragged' * ragged}", _prefill(1024 * k, ragged), quick=k == 4 and not ragged)
        for ragged in (False, True)
        for k in (1, 4, 16)
    ]
    found += [
        AttentionCase("decode 64 lognormal to 8.8k", Batch(tuple(lognormal(7.3, 0.8, seed=1106))), quick=True),
        AttentionCase("decode 64 lognormal to 10.3k", Batch(tuple(lognormal(7.0, 1.0, seed=158)))),
        AttentionCase("mixed 2k prefill, 63 decode 2k", Batch(((2048, 2048), *((2048, 1),) * 63)), quick=True),
    ]
    found += _shared(32, 8192, 256, LLAMA)
    found += _variants("decode 64 x 4k", Batch(((4096, 1),) * 64))
    found += _variants("prefill 4k", _prefill(4096, ragged=False))
    found += [AttentionCase(f"decode 37 odd, page {page}", _odd(37, page, LLAMA)) for page in (8, 64, 128, 1, 3)]
    found += [AttentionCase(f"decode 37 odd, heads {_named(heads)}", _odd(37, 16, heads)) for heads in (
        Heads(32, 8, 64), Heads(16, 8, 256), Heads(8, 8, 128), Heads(28, 4, 128), Heads(64, 8, 128), Heads(32, 2, 128),
    )]  # fmt: skip
    found += [
        AttentionCase("prefill 4k, heads " + _named(heads), Batch(((4096, 4096),), heads=heads))
        for heads in (Heads(32, 8, 64), Heads(16, 8, 256), Heads(28, 4, 128))
    ]
    found.append(AttentionCase("prefill 3001, page 64", Batch(((3001, 3001),), page_size=64)))
    return found


def cpu_cases() -> list[AttentionCase]:
    """The cases on a CPU: sizes for two cores."""
    decode, prefill = Batch(((2048, 1),) * 8, heads=QWEN), _prefill(1024, ragged=False, heads=QWEN)
    found = [
        AttentionCase("decode 1 x 4k", Batch(((4096, 1),), heads=QWEN), quick=True),
        AttentionCase("decode 8 x 2k", decode, quick=True),
        AttentionCase("decode 32 x 512", Batch(((512, 1),) * 32, heads=QWEN)),
        AttentionCase("decode 16 lognormal", Batch(tuple(lognormal(6.5, 0.8, 0, 16)), heads=QWEN), quick=True),
        AttentionCase("prefill 512", _prefill(512, ragged=False, heads=QWEN)),
        AttentionCase("prefill 1k", prefill, quick=True),
        AttentionCase("prefill 1k ragged", _prefill(1024, ragged=True, heads=QWEN)),
        AttentionCase("mixed 512 prefill, 7 decode 1k", Batch(((512, 512), *((1024, 1),) * 7), heads=QWEN), quick=True),
    ]
    found += _shared(8, 1024, 256, QWEN)
    found += _variants("decode 8 x 2k", decode)
    found += _variants("prefill 1k", prefill)
    found += [AttentionCase(f"decode 5 odd, page {page}", _odd(5, page, QWEN)) for page in (1, 3, 64)]
    found += [AttentionCase(f"decode 5 odd, heads {_named(heads)}", _odd(5, 16, heads)) for heads in (
        Heads(16, 8, 64), Heads(8, 8, 128), Heads(28, 4, 128),
    )]  # fmt: skip
    return found


def _prefill(length: int, ragged: bool, heads: Heads = LLAMA) -> Batch:
    return Batch(((length, length),), heads=heads, ragged=ragged)


def _odd(n: int, page_size: int, heads: Heads) -> Batch:
    """Lengths that are multiples of nothing."""
    return Batch(tuple((1237 + 211 * i % 5003, 1) for i in range(n)), heads=heads, page_size=page_size)


def _named(heads: Heads) -> str:
    return f"{heads.n_q_heads}/{heads.n_kv_heads} x {heads.head_dim}"


def _shared(n: int, n_shared: int, n_own: int, heads: Heads) -> list[AttentionCase]:
    """Shared keys read once; planned as if nothing was known of them; and in pages of each sequence's own."""
    spans, name = ((n_shared + n_own, 1),) * n, f"shared {n} x ({n_shared} + {n_own})"
    plain = Batch(spans, heads=heads, n_shared=n_shared, tell_shared=False)
    return [
        AttentionCase(f"{name} in own pages", Batch(spans, heads=heads), peers=False),
        AttentionCase(f"{name} plain", plain, peers=False),
        AttentionCase(name, dataclasses.replace(plain, tell_shared=True), baseline=f"{name} plain", peers=False),
    ]


def _variants(name: str, batch: Batch) -> list[AttentionCase]:
    return [
        AttentionCase(f"{name} {variant}", batch, variant, baseline=name, quick=variant == "soft_cap", peers=False)
        for variant in MEASURED_VARIANTS
    ]


def implementations(device_type: str) -> list[str]:
    """Those of the device that are worth timing: the reference only where nothing else runs."""
    names = [entry.name for entry in catalog.runnable("attention", device_type, "run")]
    return [name for name in names if name != "reference"] or names


def _contenders(entry: AttentionCase, setting: Setting) -> Iterable[Contender]:
    inputs = Inputs(entry.batch, setting)
    variant = entry.make_variant(setting.device)
    for name in implementations(setting.device.type):
        yield Contender(name, functools.partial(_calls, name, inputs, variant))
    if entry.peers:
        yield from peers.peers(inputs, all_backends=entry.in_flops)


def _calls(name: str, inputs: Inputs, variant: Variant) -> Sequence[Call]:
    plan, q = inputs.plan(variant), inputs.q
    module, out = able(name, plan, variant, q.dtype, inputs.pools[0][0].dtype), torch.empty_like(q)
    return [functools.partial(module.run, q, k, v, plan, variant, out, None) for k, v in inputs.pools]


def able(name: str, plan: AttnPlan, variant: Variant, dtype: torch.dtype, kv_dtype: torch.dtype) -> ModuleType:
    """The implementation. Raises NotRun when it does not take these inputs, RuntimeError when it should but cannot."""
    entry = catalog.entry("attention", name)
    arguments = (plan, variant, dtype, kv_dtype)
    reason = entry.obstacle(dtype, *arguments)
    if reason is not None:
        # The machine suits it, or it would not be among the implementations: what is left is a build that failed.
        if entry.static_obstacle(*arguments) is None:
            raise RuntimeError(reason)
        raise NotRun(reason)
    return entry.load()


def _prepare(entry: AttentionCase, setting: Setting) -> None:
    """Run a small batch of the same kind, so that each implementation builds what the case needs."""
    small = dataclasses.replace(entry, batch=dataclasses.replace(entry.batch, spans=SMALL_SPANS, n_shared=0))
    inputs, variant = Inputs(small.batch, setting, n_copies=1), small.make_variant(setting.device)
    for name in implementations(setting.device.type):
        with contextlib.suppress(NotRun):
            for call in _calls(name, inputs, variant):
                call()
    setting.timer.synchronize()


def _planners(setting: Setting) -> Iterable[Contender]:
    """The host's part: one call of `plan` for decode and prefill sequences in one step."""
    mixed = [(kv_len, 1 if i % 8 else min(kv_len, 64)) for i, (kv_len, _) in enumerate(lognormal(7.0, 1.0, 3, 256))]
    batch = Batch(tuple(mixed))
    table = torch.from_numpy(batch.page_table()[0]).to(setting.device)
    slots = np.arange(PLAN_SPANS, dtype=np.int32)
    sizes = dataclasses.asdict(batch.heads) | {"page_size": batch.page_size}
    plan = functools.partial(op.plan, batch.q_indptr(), batch.kv_lens, slots, table, **sizes)
    yield Contender("plan", lambda: [plan], on_host=True)
    if setting.device.type == "cuda":

        def into_buffers() -> Sequence[Call]:
            return [functools.partial(plan, buffers=op.plan_buffers(plan(), PLAN_SPANS, max_large=MAX_LARGE))]

        yield Contender("plan into buffers", into_buffers, on_host=True)
