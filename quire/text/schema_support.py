"""What a schema asks that no grammar can enforce, told with its place and with what would do instead.

Owns those words. Which keywords they are the grammar library says (`text/grammar`), when it has met one: it looks at
what a schema uses alone, and a keyword in a definition that nothing refers to does no harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Final

from quire.text.schema_check import children

_UNIMPLEMENTED: Final = re.compile(r'Unimplemented keys: (\[".*"\])')
_CASES: Final = "write the cases as schemas of anyOf"
INSTEAD: Final = {
    "not": "say what is allowed, with type, enum, const, pattern or anyOf",
    "if": _CASES,
    "then": _CASES,
    "else": _CASES,
    "dependentRequired": _CASES,
    "dependentSchemas": _CASES,
    "dependencies": _CASES,
    "uniqueItems": "leave it out, and look for repetitions yourself",
    "contains": "say with items and prefixItems what each item is",
    "minContains": "say with items and prefixItems what each item is",
    "maxContains": "say with items and prefixItems what each item is",
    "propertyNames": "give patternProperties, and additionalProperties: false",
    "unevaluatedProperties": "give additionalProperties: false beside all properties",
    "unevaluatedItems": "give items: false beside prefixItems",
    "$dynamicRef": "refer with $ref",
}
_ELSE: Final = "leave it out, and look at it yourself when the answer is there"


def explained(error: str, grammar: str) -> str:
    """The library's `error` about `grammar` (JSON text of `grammar_of`): with the place and what would work, if it is
    about keywords of a schema, else as it is."""
    found = _UNIMPLEMENTED.search(error)
    if found is None:
        return error
    keys = json.loads(found[1])
    places = [place for schema in _schemas(grammar) for place in _places(schema, keys, "$")]
    if not places:
        return error
    more = f" (and {len(places) - 1} more such keywords)" if len(places) > 1 else ""
    instead = INSTEAD.get(places[0].rpartition(".")[2], _ELSE)
    return f"{places[0]}{more} in the schema cannot be enforced: {instead}"


def _schemas(grammar: str) -> Iterator[Any]:
    """Of the grammar itself, and of the rules of its Lark parts."""
    for part in json.loads(grammar)["grammars"]:
        if "json_schema" in part:
            yield part["json_schema"]
        for piece in part.get("lark_grammar", "").split("%json ")[1:]:
            try:
                yield json.JSONDecoder().raw_decode(piece)[0]
            except ValueError:  # the user's own Lark, with a schema that is no JSON
                continue


def _places(node: Any, keys: Collection[str], where: str) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (f"{where}.{key}" for key in node if key in keys)
        for path, child in children(node, where):
            yield from _places(child, keys, path)
