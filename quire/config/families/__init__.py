"""The families of models that Quire reads: one file of tables each. No other file names a family."""

from __future__ import annotations

from typing import Final

from quire.config.families import (
    cohere,
    deepseek,
    exaone,
    falcon,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    hybrid,
    lfm2,
    llama,
    mamba,
    minicpm,
    mixtral,
    nemotron,
    olmo,
    phi,
    qwen_moe,
    qwen_next,
    stablelm,
    starcoder,
)
from quire.config.families.family import GGUF_STACKS, STACKS, Family, Gguf, Order, Stored

MODULES: Final = (
    llama, gemma, gpt, olmo, granite, glm, phi, cohere, starcoder, stablelm, falcon, minicpm, exaone, nemotron,
    lfm2, qwen_next, mamba, hybrid,
    mixtral, qwen_moe, gpt_oss, deepseek,
)  # fmt: skip
FAMILIES: Final[dict[str, Family]] = {family.architecture: family for module in MODULES for family in module.FAMILIES}
"""Architecture name in config.json → family."""


def family_named(name: str) -> Family:
    """The family of a `ModelArch`."""
    return next(family for family in FAMILIES.values() if family.name == name)


__all__ = ["FAMILIES", "GGUF_STACKS", "STACKS", "Family", "Gguf", "Order", "Stored", "family_named"]
