"""`Session` on a GPU in bfloat16 against the same on the CPU in float32: experts, latent attention, states, windows."""

from __future__ import annotations

import pathlib

import pytest
import torch
from family_cases import CASES, random_checkpoint

from quire.compute.device.device import Device
from quire.compute.platform import platform_of
from quire.compute.quantize.session import Recipe, Session, Streams
from quire.compute.quantize.source import Source
from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.quantize import FORMATS

pytestmark = pytest.mark.gpu


def outcome(folder: pathlib.Path, device: Device, method: str) -> tuple[float, float, list[float]]:
    """Bits before and after, and the error of each matrix."""
    dtype = torch.float32 if device.is_host else torch.bfloat16
    source = Source(folder, read_arch(folder), dtype, device.torch_device)
    ids = torch.randint(1, 256, (20, 48), generator=torch.Generator().manual_seed(7)).to(device.torch_device)
    with torch.inference_mode():
        session = Session(source, device, Recipe(FORMATS["int4-g32"], method), Streams(ids[:16], ids[16:]))
        errors = [error for report in session.layers() for error, _ in report.errors.values()]
        assert all(tensor.device.type == "cpu" for tensor in session.rest().values())
        return *session.quality(), errors


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("case", ["seed_oss", "qwen2_moe", "gemma2", "deepseek_v3", "bamba"])
def test_equals_the_cpu(case: str, method: str, tmp_path: pathlib.Path) -> None:
    family, fields = CASES[case]
    random_checkpoint(tmp_path, family, dtype=torch.bfloat16, **fields)
    cpu, cuda = (
        outcome(tmp_path, platform_of(EngineConfig(device=name)).device, method)  # type: ignore[arg-type]
        for name in ("cpu", "cuda")
    )
    assert cuda[0] == pytest.approx(cpu[0], rel=5e-3) and cuda[1] == pytest.approx(cpu[1], rel=1e-2)
    assert len(cuda[2]) == len(cpu[2])
    assert sum(cuda[2]) == pytest.approx(sum(cpu[2]), rel=0.1)
