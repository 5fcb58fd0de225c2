"""What the planner counts as launches of a layer beside a plain one's is what the layer does beside its products."""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire.compute.device.cpu import CpuDevice
from quire.compute.layers import feed_forward, norm
from quire.compute.layers.decoder_layer import DecoderLayer
from quire.compute.layers.rotary import rotary_tables
from quire.compute.quantize.alone import Alone
from quire.compute.schemes.choice import schemes_on
from quire.config.feed_forward import FeedForwardSpec
from quire.config.model import read_arch
from quire.config.parameters import layer_parameters
from quire.planner.launches import Launches, launches_apart

SHAPES = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
HIDDEN, ROWS = 64, 3
GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "logits_scaling": 8.0,
}  # fmt: skip


class Counted(TorchDispatchMode):
    """How often tensors of a whole row each were copied, or added to others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("add_", "copy_", "clamp_") and len(args[0]) == ROWS and args[0].is_floating_point():
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def counting(found: collections.Counter[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return run(*args, **kwargs)

    return counted


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama-3.1-8b", {}), ("qwen3-0.6b", {}), ("gemma-3-1b", {}), ("gemma-2-9b", {}), ("starcoder2-7b", {}),
        ("olmoe-1b-7b", {}), ("olmoe-1b-7b", {"clip_qkv": 8.0}), ("llama-3.1-8b", GRANITE),
    ],
)  # fmt: skip
def test_launches_apart_are_those_of_the_layer(
    name: str, overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of the shape, narrower and without experts. RMS norms that are called are those that no product takes."""
    arch = read_arch(SHAPES / name, overrides)
    spec, kind = arch.layers[0], {"size": 2 * HIDDEN}
    plain = spec.ffn if isinstance(spec.ffn, FeedForwardSpec) else FeedForwardSpec(**kind)
    spec = msgspec.structs.replace(spec, ffn=msgspec.structs.replace(plain, **kind))
    parameters, make = layer_parameters(spec, HIDDEN, 0), functools.partial(torch.zeros, dtype=torch.float32)
    device = CpuDevice()
    table = rotary_tables(arch, 64)[spec.mixer.rope]
    layer = DecoderLayer(spec, parameters, 0, make, schemes_on(device.torch_device, torch.float32), table)
    for linear in layer.linears:
        linear.finish()
    alone = Alone(msgspec.structs.replace(arch, layers=(spec,), hidden_size=HIDDEN), spec, ROWS, torch.float32, device)
    with Counted() as counted, torch.inference_mode():
        for module, one in ((norm, "rms_norm"), (feed_forward, "activate")):
            monkeypatch.setattr(module, one, counting(counted.found, one, getattr(module, one)))
        alone.run(layer, torch.zeros(1, ROWS, HIDDEN))
    sums = counted.found["add_"]
    assert launches_apart(spec, parameters) == Launches(sum(counted.found.values()), sums), counted.found
