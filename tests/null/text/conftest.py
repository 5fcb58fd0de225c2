"""Tokenizers as folders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(tokenizer or text of tokenizer.json or None, tokenizer_config) → a folder with these files."""

    def make(tokenizer: tokenizers.Tokenizer | str | None, config: dict[str, Any] | str | None = None) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        if tokenizer is not None:
            text = tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()
            (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        if config is not None:
            text = config if isinstance(config, str) else json.dumps(config)
            (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        return folder

    return make
