"""Dense attention on the CPU: float64 against autograd of the reference and against differences, memory, refusals."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from flash_case import VARIANTS, Case, check

from quire.kernels.attention.variant import Variant, variants
from quire.kernels.flash import cpu, flash_attention, reference

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(cpu, "ROWS", 16)
    monkeypatch.setattr(cpu, "KEYS", 24)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_autograd_of_the_reference(variant: str, dtype: torch.dtype) -> None:
    for q_len, kv_len, hq, hk in ((1, 1, 1, 1), (1, 70, 4, 2), (45, 81, 6, 2), (60, 33, 3, 1)):
        check(Case(variant, 2, q_len, kv_len, hq, hk, 24), dtype)


@pytest.mark.parametrize("variant", ["causal", "sinks", "soft-cap", "mask"])
def test_gradients_equal_differences(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ROWS", 3)
    monkeypatch.setattr(cpu, "KEYS", 4)
    case = Case(variant, 2, 5, 7, 2, 1, 3)
    built = case.build()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attention(q, k, v, built, return_lse=True)
        return out, lse.masked_fill(torch.isinf(lse), 0.0)

    assert torch.autograd.gradcheck(attend, case.inputs(torch.float64))


def test_ragged_sequences_equal_each_alone() -> None:
    lengths, kv_lengths = [30, 0, 1, 45], [40, 5, 33, 45]
    parts = [Case("own", 1, m, n, 4, 2, 16).inputs(torch.float64) for m, n in zip(lengths, kv_lengths, strict=True)]
    variant = Case("own", 1, 1, 1, 4, 2, 16).build()
    bounds = [torch.tensor([0, *x]).cumsum(0) for x in (lengths, kv_lengths)]
    joined = [torch.cat([part[i][0] for part in parts]).detach().requires_grad_() for i in range(3)]
    out, lse = flash_attention(*joined, variant, q_indptr=bounds[0], kv_indptr=bounds[1], return_lse=True)
    seed = torch.randn_like(out)
    slopes = torch.autograd.grad(out, joined, seed)
    for i, part in enumerate(parts):
        rows = [slice(int(b[i]), int(b[i + 1])) for b in (bounds[0], bounds[1], bounds[1])]
        # q_row counts rows over the batch: `own` reads q_row % 3, so give the sequence the offset it had.
        alone = _shifted(variant, rows[0].start)
        expected, expected_lse = reference.flash_attention(*part, alone)
        torch.testing.assert_close(out[rows[0]], expected[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse[rows[0]], expected_lse[0], rtol=1e-10, atol=1e-12)
        right = torch.autograd.grad(expected, part, seed[None, rows[0]])
        for slope, there, one in zip(slopes, rows, right, strict=True):
            torch.testing.assert_close(slope[there], one[0], rtol=1e-10, atol=1e-11)


def _shifted(variant: Variant, by: int) -> Variant:
    class Moved:
        def __init__(self, site: object) -> None:
            self.site = site

        def __getattr__(self, name: str) -> object:
            value = getattr(self.site, name)
            return value + by if name == "q_row" else value

    hook = variant.logits_transform
    return dataclasses.replace(variant, logits_transform=lambda x, site, p: hook(x, Moved(site), p))


def test_saves_five_tensors_and_peaks_linearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    saved: list[torch.Tensor] = []
    peaks = []
    for length in (512, 1024, 2048):
        saved.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            inputs = Case("window", 1, length, length, 2, 1, 16).inputs(torch.float32)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
                out = flash_attention(*inputs, Variant(0.25))
            out.sum().backward()
        now = peak = 0
        for event in profile.profiler.kineto_results.events():
            now += event.nbytes() if event.name() == "[memory]" else 0
            peak = max(peak, now)
        peaks.append(peak)
        assert len(saved) == 5
        assert sum(x.numel() for x in saved) == length * 16 * (2 + 1 + 1 + 2) + length * 2
    assert peaks[0] > 0
    assert peaks[2] < 2.1 * peaks[1] < 2.1 * 2.1 * peaks[0], peaks


def test_output_transforms_and_their_gradients_come_from_torch() -> None:
    """What a refusal says to do instead: learned sinks from out and lse, with the gradient of the sinks."""
    inputs = Case("causal", 1, 20, 20, 4, 2, 8).inputs(torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse = flash_attention(*inputs, Variant(0.3), return_lse=True)
    got = out * torch.sigmoid(lse - sinks)[..., None]
    q, k, v = inputs
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 0.3
    logits = logits.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), float("-inf"))
    logits = torch.cat((logits, sinks[None, :, None, None].expand(1, 4, 20, 1)), -1)
    right = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1)[..., :-1], v.repeat_interleave(2, 2))
    torch.testing.assert_close(got, right)
    seed = torch.randn_like(got)
    slopes, expected = (torch.autograd.grad(x, [*inputs, sinks], seed) for x in (got, right))
    torch.testing.assert_close(slopes, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variant": variants.learned_sinks(1.0, torch.zeros(4))}, "output_transform: transform the result in torch"),
        ({"variant": variants.rotary(1.0, torch.zeros(8, 8))}, "query_transform: transform q in torch"),
        ({"variant": Variant(1.0, value_transform=lambda x, site, p: x)}, "value_transform: transform v"),
        ({"variant": variants.sigmoid_attention(1.0, 0.0)}, "softmax=False"),
        ({"variant": variants.alibi(1.0, torch.zeros(4, requires_grad=True))}, "'slopes' requires a gradient"),
        ({"variant": variants.alibi(1.0, torch.zeros(4, device="meta"))}, "on meta and q on cpu"),
        ({"variant": Variant(0.0)}, "scale 0.0 must be positive"),
        ({"k": torch.zeros(1, 5, 3, 8)}, "and k like v"),
        ({"k": torch.zeros(1, 5, 3, 8), "v": torch.zeros(1, 5, 3, 8)}, "4 query heads cannot share 3"),
        ({"k": torch.zeros(2, 5, 2, 8), "v": torch.zeros(2, 5, 2, 8)}, "differ in batch or head_dim"),
        ({"q": torch.zeros(1, 5, 4, 8).half()}, "one floating dtype"),
        ({"q": torch.zeros(5, 4, 8)}, r"\[batch, length, heads, d\]"),
        ({"q_indptr": torch.tensor([0, 5])}, "come together"),
    ],
)
def test_refusals_say_what_to_do(change: dict[str, object], message: str) -> None:
    kv = torch.zeros(1, 5, 2, 8)
    given = {"q": torch.zeros(1, 5, 4, 8), "k": kv, "v": kv, "variant": Variant(1.0)} | change
    with pytest.raises(ValueError, match=message):
        flash_attention(**given)


def test_without_a_variant_it_is_causal_as_torchs_own() -> None:
    q, k, v = (torch.randn(2, 7, 4, 16, requires_grad=True) for _ in range(3))
    out = flash_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    slopes, right = (torch.autograd.grad(x.sum(), [q, k, v]) for x in (out, expected))
    torch.testing.assert_close(slopes, right)
    ragged = flash_attention(q[0], k[0], v[0], q_indptr=torch.tensor([0, 7]), kv_indptr=torch.tensor([0, 7]))
    torch.testing.assert_close(ragged, out[0])
    with pytest.raises(ValueError, match="batch, length, heads, d"):
        flash_attention(torch.zeros(()), torch.zeros(()), torch.zeros(()))


def test_ragged_bounds_are_checked() -> None:
    q = torch.zeros(5, 2, 8)
    for bounds in ([0, 4], [1, 5], [0, 6, 5], [0]):
        with pytest.raises(ValueError, match="q_indptr"):
            flash_attention(q, q, q, Variant(1.0), q_indptr=torch.tensor(bounds), kv_indptr=torch.tensor([0, 5]))


@pytest.mark.parametrize("script", ["interpreted_flash.py", "compiled_flash.py"])
def test_cuda_kernels_without_a_gpu(script: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": str(int("interpreted" in script)),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DISABLE_LINE_INFO": "1",
        "PYTHONPATH": f"{HERE.parents[3]}{os.pathsep}{HERE.parent}",
    }
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
