"""Blocks of GGUF files against the package gguf, for random bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.compute.weights.gguf_blocks import DECODERS
from quire.config.gguf import BLOCKS

SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Bytes where the float16 numbers of a block begin."""


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_equal_to_the_package(name: str) -> None:
    random = np.random.default_rng(0)
    block_len, block_bytes = next((length, size) for other, length, size in BLOCKS.values() if other == name)
    blocks = random.integers(0, 256, (500, block_bytes), dtype=np.uint8)
    for start in SCALES[name]:
        blocks[:, start : start + 2] = random.normal(size=(500, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] %= 250  # beyond lie infinities
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    found = DECODERS[name](torch.from_numpy(blocks))
    assert found.dtype == torch.float32 and found.shape == (500, block_len)
    assert np.array_equal(found.numpy(), expected)


def test_every_number_of_mxfp4() -> None:
    """Each code with each exponent, from those below float32's normal numbers to those beyond it; the last is NaN,
    which the package has as 2^128."""
    codes = np.arange(16, dtype=np.uint8)
    blocks = np.concatenate((np.arange(255, dtype=np.uint8)[:, None], np.tile(codes | codes[::-1] << 4, (255, 1))), 1)
    found = DECODERS["MXFP4"](torch.from_numpy(blocks))
    levels = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), dtype=torch.float64)
    levels = torch.cat((levels, -levels))
    powers = torch.exp2(torch.arange(255, dtype=torch.float64) - 127)[:, None]
    assert torch.equal(found, (powers * torch.cat((levels, levels.flip(0)))).float())
    with np.errstate(over="ignore"):
        assert np.array_equal(found.numpy(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))
    blocks[0, 0] = 255
    assert bool(DECODERS["MXFP4"](torch.from_numpy(blocks))[0].isnan().all())


def test_sizes_of_the_package() -> None:
    for kind, (name, block_len, block_bytes) in BLOCKS.items():
        assert gguf.GGMLQuantizationType(kind).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (block_len, block_bytes)
