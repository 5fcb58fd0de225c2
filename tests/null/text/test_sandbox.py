"""Hostile chat templates end in an error, soon, and without much memory."""

from __future__ import annotations

import resource
import time

import pytest

from quire.core.errors import ConfigError, QuireError, RequestError
from quire.text import sandbox
from quire.text.chat_template import ChatTemplate

DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | tojson }}"
)
LOOP = "{% for i in range(99999) %}STEP{% endfor %}"
GREEDY = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless_calls": "{% macro f(n) %}" + LOOP.replace("STEP", "{{ f(n - 1) if n }}") + "{% endmacro %}{{ f(5) }}",
    "endless_filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "text_times": "{{ 'x' * 10 ** 9 }}",
    "times_text": "{{ 10 ** 9 * 'x' }}",
    "list_times": "{{ ([0] * 10 ** 9) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": DOUBLED.replace("START", "9 ** 9").replace("STEP", "ns.x * ns.x"),
    "tilde": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
    "plus": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "nested_lists": DOUBLED.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]"),
    "nested_tuples": DOUBLED.replace("START", "[1]").replace("STEP", "(ns.x, ns.x)"),
    "nested_dicts": DOUBLED.replace("START", "[1]").replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "nested_calls": DOUBLED.replace("START", "[1]").replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "format_method": "{{ '{:>1000000000}'.format(1) }}",
    "format_width": "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
    "format_repeated": "{{ ('{0:9999}' * 99999).format(1) }}",
    "format_operator": "{{ '%1000000000d' % 1 }}",
    "format_star": "{{ '%*d' % (10 ** 9, 1) }}",
    "format_filter": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10 ** 9) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "tojson_indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list | length }}",
    "join_filter": "{{ range(99999) | list | join('x' * 99999) }}",
    "join_method": "{{ ('x' * 99999).join(range(99999) | map('string')) }}",
    "replace_filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace_method": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "printed": "{% set big = range(99999) | list %}{% set x %}" + LOOP.replace("STEP", "{{ big }}") + "{% endset %}",
    "captured": "{% set x %}" + LOOP.replace("STEP", "{{ 'x' * 999999 }}") + "{% endset %}",
    "captured_once": "{% set big = 'x' * 999999 %}{% set x %}" + LOOP.replace("STEP", "{{ big }}") + "{% endset %}",
    "macro": "{% macro f(x) %}" + LOOP.replace("STEP", "{{ x }}") + "{% endmacro %}{{ f('x' * 999999) | length }}",
    "strftime": "{{ strftime_now('%c' * 9999999) | length }}",
    "sum": "{{ ([range(999) | list] * 99999) | sum(start=[]) | length }}",
    "wordwrap": "{{ ('a' * 99999) | wordwrap(1, wrapstring='b' * 99999) | length }}",
    "keywords": "{{ ('a' * 99999) | replace(old='a', new='b' * 99999) }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attr_filter": "{{ '' | attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "mutation": "{{ messages.append(1) }}",
    "bytes": "{{ 'a'.encode().ljust(10 ** 9) }}",
    "integer_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "translate": "{{ 'a'.translate({97: 'b' * 99999}) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive_loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "range": "{{ range(10 ** 9) | list }}",
    "loader": "{% include '/etc/passwd' %}",
}
UNCOMPILED = {
    "ifs": "{% if x %}" * 5500 + "{% endif %}" * 5500,
    "fors": "{% for x in y %}" * 200 + "{% endfor %}" * 200,
    "brackets": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "sums": "{{ 1" + "+1" * 20_000 + " }}",
    "attributes": "{{ a" + ".a" * 30_000 + " }}",
    "syntax": "{% for %}",
    "filter": "{{ 'x' | nosuchfilter }}",
    "long": "x" * (sandbox.MAX_SOURCE_CHARS + 1),
}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDER_S", 0.3)


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_templates_are_refused_when_loaded(name: str) -> None:
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started_s = time.process_time()
    with pytest.raises(ConfigError, match=r"takes longer|more than \d+ characters"):
        ChatTemplate({"default": GREEDY[name]}, {})
    assert time.process_time() - started_s < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < 2**29


@pytest.mark.parametrize("name", ESCAPES)
def test_ways_out_are_closed(name: str) -> None:
    with pytest.raises(QuireError) as caught:
        text = ChatTemplate({"default": ESCAPES[name]}, {}).render(MESSAGES)
        assert "<class" not in text and "root:" not in text
        raise RequestError("nothing came out")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", UNCOMPILED)
def test_templates_that_cannot_be_compiled(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not compile|the limit is"):
        ChatTemplate({"default": UNCOMPILED[name]}, {})


def test_a_template_that_is_greedy_for_some_input_only() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content * (10 ** 9 if messages | length > 1 else 1) }}"}, {})
    assert template.render(MESSAGES) == "hello"
    with pytest.raises(RequestError, match="characters") as caught:
        template.render(MESSAGES * 2)
    assert caught.value.param == "messages"
    assert template.render(MESSAGES) == "hello", "the next rendering starts afresh"


def test_large_honest_conversations_pass() -> None:
    source = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim | replace('\\n', ' ') + '\\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 500}] * 400
    assert len(ChatTemplate({"default": source}, {}).render(messages)) == 400 * (2499 + 7)
