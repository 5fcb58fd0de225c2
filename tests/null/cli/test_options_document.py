"""docs/options.md is what the option structs say."""

from __future__ import annotations

from quire.cli.options_document import DOCUMENT, SECTIONS, options_document
from quire.config.options import describe


def test_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == options_document(), "run: python -m quire.cli.options_document"


def test_every_option_has_a_meaning() -> None:
    for _, _, options in SECTIONS:
        for option in describe(options):
            assert option.meaning, f"{options.__name__}.{option.name}"
