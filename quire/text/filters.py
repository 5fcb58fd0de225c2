"""Filters of chat templates that keep track of where text comes from: Jinja's own, and transformers' tojson.

Owns which filters do. Does not own limits (`text/sandbox`) nor the tracking (`text/origin`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import jinja2
from markupsafe import Markup

from quire.text.origin import TracedMarkup, TracedText, as_text, escaped, filled, origins_of, plain

PASSING: Final = frozenset(
    """abs attr batch count d default dictsort first float groupby int items last length list map max min random reject
    rejectattr reverse round select selectattr slice sort sum unique""".split()  # noqa: SIM905
)
"""Filters that make no text of their own: what comes out went in."""
FOLLOWED: Final = frozenset("capitalize e escape format join lower replace safe string trim upper".split())  # noqa: SIM905
"""Filters that keep the origin of each character of a traced text (`text/origin`); others give a blend of all."""


def format_text(form: Any, *args: Any, **kwargs: Any) -> str:
    """Jinja's `format`, followed."""
    if (args and kwargs) or isinstance(form, Markup):
        return str(jinja2.filters.do_format(form, *args, **kwargs))
    return filled(as_text(form), kwargs or args)


@jinja2.pass_environment
def join_text(environment: jinja2.Environment, items: Any, separator: Any = "", attribute: Any = None) -> str:
    """Jinja's `join`, followed."""
    if attribute is not None:
        items = map(jinja2.filters.make_attrgetter(environment, attribute), items)
    separator = as_text(separator)
    return TracedText(separator, origins_of(separator)).join(map(as_text, items))


def replace_text(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Jinja's `replace`, followed."""
    text = as_text(text)
    return TracedText(text, origins_of(text)).replace(as_text(old), as_text(new), -1 if count is None else count)


def escape_text(value: Any) -> Markup:
    """Jinja's `escape`, followed."""
    return escaped(value if isinstance(value, Markup) else as_text(value))


def safe_text(value: Any) -> Markup:
    """Jinja's `safe`, followed."""
    text = as_text(value)
    return TracedMarkup(plain(text), origins_of(text))


def tojson_text(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it: no HTML escapes, and json.dumps' options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


OWN: Final[dict[str, Callable[..., Any]]] = {
    "e": escape_text,
    "escape": escape_text,
    "format": format_text,
    "join": join_text,
    "replace": replace_text,
    "safe": safe_text,
    "tojson": tojson_text,
}
"""Those that take the place of Jinja's."""
