"""Traced text: the values of str, and characters of a request that stay the request's whatever a template does."""

from __future__ import annotations

import builtins
import string
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup

from quire.core.errors import ConfigError
from quire.text import sandbox
from quire.text.chat_template import ChatTemplate
from quire.text.origin import ANYBODY, Origin, TracedText, as_text, blend, filled, joined, origins_of, plain, traced

OURS, THEIRS, SHARED = "ab<|>%", "XYZ", " ,\n"
"""Characters of the template, of a request, and of both."""
NO_TEXT = set(
    """count encode endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric
    isprintable isspace istitle isupper rfind rindex startswith maketrans""".split()  # noqa: SIM905
)
"""Methods of str that give no text; templates may not call `encode` and `maketrans`."""
texts = st.lists(
    st.one_of(
        st.text(OURS + SHARED, max_size=6),
        st.text(THEIRS + SHARED, max_size=6).map(lambda text: TracedText(text, Origin.REQUEST)),
    ),
    max_size=5,
).map(joined)


def expect(found: Any, value: Any, exact: bool) -> None:
    """`found` has the `value`, and the origin of each character is that of its alphabet, or, not exact, a worse one."""
    if isinstance(value, (list, tuple)):
        assert type(found) is type(value) and len(found) == len(value)
        for one, expected in zip(found, value, strict=True):
            expect(one, expected, exact)
        return
    assert found == value
    if isinstance(value, str):
        origins = origins_of(found)
        assert len(origins) == len(value)
        for char, origin in zip(value, origins, strict=True):
            assert char not in THEIRS or origin == Origin.REQUEST or (origin & Origin.REQUEST and not exact)
            assert char not in OURS or origin == Origin.TEMPLATE or not exact


METHODS: dict[str, Any] = {
    "__add__": lambda a, b, n: a + b,
    "__radd__": lambda a, b, n: "a" + a + "b",
    "__getitem__": lambda a, b, n: [a[n:], a[:n], a[::-1], a[1:n:2], *[a[i] for i in range(len(a))]],
    "__iter__": lambda a, b, n: list(a),
    "__mul__": lambda a, b, n: [a * n, n * a],
    "__str__": lambda a, b, n: str(a),
    "join": lambda a, b, n: a.join([b, "ab", b]),
    "lstrip": lambda a, b, n: [a.lstrip(), a.lstrip(b)],
    "partition": lambda a, b, n: a.partition(b or "a"),
    "removeprefix": lambda a, b, n: [a.removeprefix(b), a.removeprefix(a[:n])],
    "removesuffix": lambda a, b, n: [a.removesuffix(b), a.removesuffix(a[n:])],
    "replace": lambda a, b, n: [a.replace("a", b), a.replace("X", b, n), a.replace(b or "b", "<", n)],
    "rpartition": lambda a, b, n: a.rpartition(b or "a"),
    "rsplit": lambda a, b, n: [a.rsplit(), a.rsplit(None, n), a.rsplit(b or "X", n), a.rsplit("ab")],
    "rstrip": lambda a, b, n: [a.rstrip(), a.rstrip(b)],
    "split": lambda a, b, n: [a.split(), a.split(None, n), a.split(b or "X", n), a.split("ab")],
    "splitlines": lambda a, b, n: [a.splitlines(), a.splitlines(True)],
    "strip": lambda a, b, n: [a.strip(), a.strip(b)],
}
WORSE: dict[str, Any] = {
    "__format__": lambda a, b, n: f"{a:>9}",
    "__mod__": lambda a, b, n: a.replace("%", "") % (),
    "__repr__": lambda a, b, n: repr(a),
    "__rmul__": lambda a, b, n: n * a,
    "center": lambda a, b, n: a.center(n, (b or "a")[0]),
    "expandtabs": lambda a, b, n: a.expandtabs(n),
    "format": lambda a, b, n: a.format(b),
    "format_map": lambda a, b, n: a.format_map({"a": b}),
    "ljust": lambda a, b, n: a.ljust(n, (b or "a")[0]),
    "rjust": lambda a, b, n: a.rjust(n, (b or "a")[0]),
    "translate": lambda a, b, n: a.translate({ord("a"): "X"}),
    "zfill": lambda a, b, n: a.zfill(n),
}
CASES = {"capitalize", "casefold", "lower", "swapcase", "title", "upper"}


def test_every_method_of_str_is_traced_or_gives_no_text() -> None:
    inherited = set(dir(builtins.object)) | NO_TEXT | {"__contains__", "__len__", "__getnewargs__"}
    missing = set(dir(str)) - inherited - METHODS.keys() - WORSE.keys() - CASES - {"__rmod__"}
    assert not missing, "these methods of str lose the origin of what they return"
    assert not {name for name in METHODS.keys() | WORSE.keys() | CASES if name not in vars(TracedText)}


@pytest.mark.parametrize("name", [*METHODS, *WORSE])
@settings(max_examples=60)
@given(a=texts, b=texts, n=st.integers(0, 12))
def test_methods_have_the_values_of_str(name: str, a: str, b: str, n: int) -> None:
    method = METHODS.get(name) or WORSE[name]
    a = TracedText(plain(as_text(a)), origins_of(a))
    expect(method(a, b, n), method(plain(a), plain(b), n), name in METHODS)


@pytest.mark.parametrize("name", sorted(CASES))
@given(text=st.text(st.sampled_from("aXß ŉΣİﬁ'\u0301"), max_size=8), cut=st.integers(0, 8))
def test_changes_of_case(name: str, text: str, cut: int) -> None:
    mixed = joined([text[:cut], TracedText(text[cut:], Origin.REQUEST)])
    found, value = getattr(as_text(mixed), name)(), getattr(text, name)()
    assert found == value and len(origins_of(found)) == len(value)
    if len(value) == len(text):
        assert origins_of(found) == origins_of(mixed)
    else:
        assert set(origins_of(found)) == {blend(mixed)}, "which character grew is not followed"


@settings(max_examples=200)
@given(a=texts, b=texts)
def test_forms_are_filled(a: str, b: str) -> None:
    for form, values in (("<%s|%s>", (a, b)), ("a%%%s", (a,)), ("<%(x)s|%(y)s", {"x": a, "y": b})):
        plainly = {k: plain(v) for k, v in values.items()} if isinstance(values, dict) else tuple(map(plain, values))
        expect(filled(form, values), form % plainly, exact=True)
    expect(filled("b%s", a), "b" + a, exact=True)
    expect(filled("b%-9s|%r", (a, b)), "b%-9s|%r" % (plain(a), plain(b)), exact=False)  # noqa: UP031
    expect(TracedText("XY", Origin.REQUEST).replace("", "<"), "<X<Y<", exact=False)
    expect(filled("b%c", TracedText("X", Origin.REQUEST)), "bX", exact=False)


def test_stand_ins_of_forms_cannot_be_forged() -> None:
    sly = TracedText("\ue0000\ue001\ue0001\ue001", Origin.REQUEST)
    expect(filled("<%s|%s>", (sly, "a")), f"<{sly}|a>", exact=True)
    expect(filled("\ue0000\ue001<%s>", (TracedText("X", Origin.REQUEST),)), "\ue0000\ue001<X>", exact=False)


def test_equality_and_hash_are_those_of_the_value() -> None:
    text = TracedText("ab", Origin.REQUEST)
    assert text == "ab" and hash(text) == hash("ab") and {"ab": 1}[text] == 1 and "a" in text and isinstance(text, str)
    assert type(plain(text)) is str
    value = traced({"k": ["v", 1, None, {"x": True}]}, Origin.MODEL)
    assert value == {"k": ["v", 1, None, {"x": True}]} and blend(value) == blend(list(value)) == Origin.MODEL


FOLLOWED = [
    "'<' + said + '>'", "said ~ '|' ~ said", "'<' ~ 3 ~ said", "['a', said, 'b'] | join('|')", "'|'.join(['a', said])",
    "'<a>' ~ said | trim ~ '|'", "('  <' + said + '> ').strip()", "said.split('Y')[0] + '<'",
    "said[1:] + 'b' + said[0]",
    "('<|a|>%s<|b|>') % said", "'<|%s|>%s' % ('a', said)", "'<|{}|>{}'.format('a', said)", "'<{x}>'.format(x=said)",
    "'<%s>' | format(said)", "('<' + said) | replace('Y', 'a')", "('<a>' | replace('a', said))",
    "'<a>'.replace('a', said)",
    "('<' + said + '>') | safe", "(('<' + said) | safe) ~ '>'", "('<' + said) | string", "said | default('<')",
    "absent | default('<|a|>')", "('<' + said) if said else '|'", "none | default('<' + said, true)",
    "['<', said] | first ~ said", "[said, '<'] | last", "[said, '<'] | reverse | join", "'<' * 3 + said * 2",
    "[{'x': said}, {'x': '<'}] | map(attribute='x') | join('|')", "['<', said] | map('trim') | join",
    "message.content ~ '<'", "message['content'] + '|'", "(said | list) | join('<')", "said.splitlines() | join('<')",
    "['<', said] | select('string') | join", "mark(said)", "cycled(said)", "('<' + said + '\\n').rstrip() + '|'",
    "said.partition('Y')[2] ~ '<'", "('<a' | safe) + said", "said | escape ~ '<'", "(said | safe) + '<'",
    "said + ('<' | safe)", "'a' + ('<' + said) | e", "'<' + (said | safe) + 'b'", "('<' + said) | e | e",
    "joiner('<')() ~ said", "{'<': said} | dictsort | first | join('|')",
]  # fmt: skip
BLENDED = [
    "{'a': said} | tojson", "[said, 'a'] | string", "{'<': said}", "('<\\n' + said) | indent(2)",
    "('<' + said) | upper | lower",
    "said | center(20) ~ '<'", "('a <' + said) | wordwrap(3)", "('<' + said) | truncate(9, true, said)",
        "('<' + said) | urlencode", "('<' + said) | striptags",
        "('<' + said) | title", "('<' + said) | forceescape", "{'a': said}.items()",
    "'<%-5s' % said", "'<%r' % said",
    "'<{:>9}'.format(said)", "'<{!r}'.format([said])", "'<%s' % [said]", "namespace(a=said)",
    "(said | replace('%', '') ~ '%s') | format('a')",
    "'{a}<'.format(**{'a': [said]})", "('%s' | safe) % said", "('<' | safe).join([said])", "('{}' | safe).format(said)",
    "'<'.join([said | safe])", "(said | safe).split('Y')[0] ~ 'a'", "[said] | tojson(indent=2)",
    "(said | safe) | replace('Y', '<')",
    "strftime_now('<' + said | replace('%', ''))", "said.ljust(9, '<')", "('<' + said).title()", "said.zfill(9)",
    "('<' ~ (said | e)).upper().lower()",
    "(said | list) | pprint if false else said | list",
]  # fmt: skip


@pytest.mark.parametrize("said", ["XYZ", " X\n YZ ", "Y", "%s{}YX"])
@pytest.mark.parametrize("expression", FOLLOWED + BLENDED)
def test_expressions_of_templates(expression: str, said: str) -> None:
    environment = sandbox.ChatEnvironment()
    source = (
        "{% macro mark(x) %}<|{{ x }}|>{% endmacro %}"
        "{% macro cycled(x) %}{% for i in range(3) %}{{ loop.cycle('<', x) }}{% endfor %}{% endmacro %}"
        "{{ EXPRESSION }}|{% set y %}<{{ EXPRESSION }}{% endset %}{{ y }}"
        "{% filter replace('Q', 'a') %}<{{ EXPRESSION }}{% endfilter %}"
    )
    template = environment.from_string(source.replace("EXPRESSION", expression))
    plainly = environment.render(template, {"said": said, "message": {"content": said}})
    value = TracedText(said, Origin.REQUEST)
    found = environment.render(template, {"said": value, "message": {"content": value}})
    expect(found, plain(as_text(plainly)), exact=expression in FOLLOWED and "%" not in said)


ARGUMENTS: dict[str, list[str]] = {
    "random": ["q"], "abs": [], "attr": ["'x'"], "batch": ["2"], "dictsort": [], "groupby": ["0"], "items": [],
    "round": [],
    "map": ["'upper'"], "reject": ["'none'"], "rejectattr": ["'q'"], "select": ["'string'"], "selectattr": ["'q'",
    "'undefined'"],
    "slice": ["2"], "replace": ["'Y'", "'<'"], "sum": ["start=''"], "default": ["'a'"], "d": ["'a'"], "join": ["'<'"],
}  # fmt: skip


@pytest.mark.parametrize("name", [*sandbox.FILTERS.split(), "tojson"])
@pytest.mark.parametrize("value", ["'<' + said", "[said, '<']", "{said: '<'}"])
def test_no_filter_loses_what_a_request_said(name: str, value: str) -> None:
    environment = sandbox.ChatEnvironment()
    arguments = ", ".join(ARGUMENTS.get(name, []))
    for shown in ("", " | list", " | list | string", " | string", " | tojson", " | map('list') | list", " | join('|')"):
        template = environment.from_string(f"{{{{ ({value}) | {name}({arguments}){shown} }}}}")
        try:
            plainly = environment.render(template, {"said": "XYZ"})
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, AssertionError):
            continue  # a filter that does not take this value
        if "object" not in plainly:  # the address of a generator
            expect(environment.render(template, {"said": TracedText("XYZ", Origin.REQUEST)}), plainly, exact=False)


def test_escaping_templates_are_refused() -> None:
    for source in (
        "{% autoescape true %}{{ x }}{% endautoescape %}",
        "{% macro f() %}{% autoescape false %}{% endautoescape %}{% endmacro %}",
    ):
        with pytest.raises(ConfigError, match=r"autoescape.* is not supported"):
            ChatTemplate({"default": source}, {})
    assert Markup("X") == as_text(Markup("X")) and blend(Markup("X")) == ANYBODY


def test_blends() -> None:
    ours, model, theirs = "a", TracedText("b", Origin.MODEL), TracedText("X", Origin.REQUEST)
    both = Origin.TEMPLATE | Origin.REQUEST
    for value, expected in (
        ([], Origin.TEMPLATE), ([ours, 1, None, 2.0], Origin.TEMPLATE), ([model], Origin.MODEL),
        ([theirs], Origin.REQUEST),
        ({theirs: [model]}, Origin.MODEL | Origin.REQUEST), ([ours, model], Origin.TEMPLATE | Origin.MODEL),
        ("", Origin.TEMPLATE),
        ({ours: theirs}, both), ([TracedText("?", both)], both), ({1: 2}.items(), ANYBODY),
        ([theirs, ours, (model,)], ANYBODY),
    ):  # fmt: skip
        assert blend(value) == expected


def test_every_ascii_character_passes() -> None:
    value = TracedText(string.printable, Origin.REQUEST)
    assert joined(list(value)) == string.printable and blend([list(value)]) == Origin.REQUEST
