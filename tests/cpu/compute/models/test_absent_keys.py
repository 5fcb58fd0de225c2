"""A config.json that lacks a key: it means what transformers takes for it, or is refused by the key's name."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import transformers
from family_cases import CASES, TINY, checkpoint_of

from quire.compute.weights.loader import fits
from quire.config.arch import ModelArch
from quire.config.families import FAMILIES
from quire.config.model import parse_arch, read_arch
from quire.core.errors import ConfigError, LoadError

OF_TEXT = {"attn_implementation", "architectures", "model_type", "num_nextn_predict_layers", "dtype"}
"""Keys that decide nothing here: a checkpoint without the number of its drafting modules has none."""
GENERAL = set(transformers.PretrainedConfig().to_dict())
OWN = {"mimo", "minicpm"}
"""Families that transformers has not."""
NAMED = {one.name: one for one in FAMILIES.values() if one.name not in OWN}


def config_of(family: str) -> type[transformers.PretrainedConfig]:
    prefix = CASES[family][0] if family in CASES else family.capitalize()
    kinds = (f"{prefix}TextConfig", f"{prefix}Config")
    return next(getattr(transformers, kind) for kind in kinds if hasattr(transformers, kind))


def parsed(config: dict[str, Any]) -> ModelArch | str:
    try:
        return parse_arch({name: value for name, value in config.items() if not name.endswith("_token_id")})
    except ConfigError as error:
        return error.message


@pytest.mark.parametrize("name", NAMED)
def test_what_is_absent_is_transformers_default_or_named(name: str) -> None:
    family = NAMED[name]
    kind, fields = config_of(family.name), CASES.get(family.name, ("", {}))[1]
    named = {"architectures": [family.architecture]}
    whole = kind(**{**TINY, **fields}).to_dict()
    whole = {name: value for name, value in whole.items() if value is not None and not name.endswith("_token_id")}
    assert isinstance(parsed(json.loads(json.dumps(whole | named))), ModelArch)
    for key in whole.keys() - OF_TEXT - (GENERAL - TINY.keys()):
        less = {one: value for one, value in whole.items() if one != key}
        ours = parsed(json.loads(json.dumps(less | named)))
        if isinstance(ours, str):
            assert key in ours, "the error names the key"
            continue
        theirs = kind(**less).to_dict() | named
        assert ours == parsed(json.loads(json.dumps(theirs))), key


def test_tensors_that_do_not_fit_point_to_absent_keys(tmp_path: pathlib.Path) -> None:
    checkpoint_of("qwen3_moe", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name, said in (
        ("num_local_experts", "num_experts .128"),
        ("moe_intermediate_size", "moe_intermediate_size .768"),
    ):
        path.write_text(json.dumps({key: value for key, value in config.items() if key != name}))
        with pytest.raises(LoadError, match=rf"(has no tensor|has shape).* absent keys count .*{said}"):
            fits(tmp_path, read_arch(tmp_path))
