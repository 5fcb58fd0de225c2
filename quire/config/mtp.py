"""Multi-token prediction modules: heads that were trained with a model and stand in its checkpoint, one layer each.

Owns where a config.json says that there is one. Does not own the names of tensors (`heads`, by family).
"""

from __future__ import annotations

import logging
import pathlib
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.families import family_named
from quire.config.gguf import is_gguf
from quire.config.heads import HeadArch
from quire.config.layers import NormKind
from quire.config.model_fields import MTP_MODULES
from quire.core.errors import ConfigError

OTHERS: Final = 'or give another method, as {"method": "ngram"}'


def mtp_head(folder: pathlib.Path, arch: ModelArch, logger: logging.Logger, name: str = "") -> HeadArch:
    """The first module of a checkpoint of `arch` in `folder`: its layer is of the kind of the model's last.

    name: of the model, as it was given; empty: the folder. Raises ConfigError where there is none.
    """
    name = name or str(folder)
    param = "speculative_config"
    if is_gguf(folder):
        raise ConfigError(
            f"MTP modules of GGUF files are not read, and {name} is one: add 'model', a folder of safetensors with "
            f"the module, {OTHERS}",
            param=param,
        )
    if not arch.n_mtp_modules:
        raise ConfigError(
            f"{name} has no MTP module, as its config.json has no {MTP_MODULES} of 1 or more: name in 'model' "
            f"a folder that has one for this model, {OTHERS}",
            param=param,
        )
    if any(norm.kind is not NormKind.RMS or not norm.weight for norm in (arch.norm, arch.layers[-1].norm)):
        raise ConfigError(
            f"MTP modules are joined behind RMS norms, and {name} describes {arch.family}, which has others: give "
            'another method, as {"method": "ngram"}',
            param=param,
        )
    if arch.n_mtp_modules > 1:
        logger.info("the first of %d MTP modules makes all guesses", arch.n_mtp_modules)
    own = msgspec.structs.replace(arch, layers=arch.layers[-1:])
    layout = family_named(arch.family).mtp
    return HeadArch(layout=layout, arch=own, vocab_size=arch.vocab_size, prefix=mtp_prefix(arch, 0))


def mtp_prefix(arch: ModelArch, number: int) -> str:
    """Of the names of a module's tensors."""
    return family_named(arch.family).mtp.prefix.format(number=number, behind=arch.n_layers + number)
