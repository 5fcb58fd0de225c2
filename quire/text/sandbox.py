"""A Jinja environment for chat templates from strangers: no way out of it, and bounded time, memory and output.

Jinja has no endless loop of its own, so it is enough to count. Every loop iteration, call and filter checks the
deadline; every value that a template makes is measured; operations that can multiply sizes are measured before they
run. Rendering therefore needs no process of its own: it ends in `TemplateLimit`, in the thread that called it.
Owns these limits. Does not own messages or files (`text/chat_template`).
"""

from __future__ import annotations

import datetime
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes, parser, runtime, visitor
from markupsafe import Markup

from quire.text.filters import FOLLOWED, OWN, PASSING
from quire.text.origin import (
    Origin,
    TracedText,
    as_text,
    blend,
    derived,
    filled,
    formatted,
    is_traced,
    joined,
    plain,
)

MAX_SOURCE_CHARS: Final = 1 << 19
MAX_OUTPUT_CHARS: Final = 1 << 23
MAX_VALUE: Final = 1 << 25
"""Largest value that a template may make: characters, plus `NODE` for each item, counted as if nothing were shared."""
MAX_TOTAL: Final = 1 << 28
"""Sum of all values made in one rendering."""
NODE: Final = 64
MAX_BITS: Final = 4096
"""Longest integer."""
MAX_RENDER_S: Final = 2.0
"""Processor time of the thread: a busy machine makes no template slow."""

FILTERS: Final = """abs attr batch capitalize center count d default dictsort e escape first float forceescape format
    groupby indent int items join last length list lower map max min random reject rejectattr replace reverse round safe
    select selectattr slice sort string striptags sum title trim truncate unique upper urlencode wordcount wordwrap"""
"""Those of Jinja's filters that a template may use, besides tojson."""
MULTIPLYING: Final = """batch center expandtabs format indent join ljust rjust slice tojson wordwrap zfill""".split()  # noqa: SIM905
"""Filters and string methods whose result can be as large as the product of their arguments."""
REFUSED_METHODS = frozenset({"translate", "maketrans", "format_map", "encode", "to_bytes"})
_ADDED_BY_JINJA = ("_loop_vars", "_block_vars")
_FORMAT_SPEC = re.compile(r"%(?:\([^)]*\))?[-+ #\d.]*|\{[^{}]*")


class TemplateLimit(jinja2.TemplateRuntimeError):
    """A template used more time, memory or output than a chat needs."""


class _Budget(threading.local):
    """What the rendering of this thread has used."""

    deadline_s = float("inf")
    total = 0

    def start(self) -> None:
        self.deadline_s = time.thread_time() + MAX_RENDER_S
        self.total = 0

    def stop(self) -> None:
        self.deadline_s = float("inf")

    def tick(self) -> None:
        if time.thread_time() > self.deadline_s:
            raise TemplateLimit(f"the chat template takes longer than {MAX_RENDER_S:g} s of processor time")

    def spend(self, value: Any) -> Any:
        """Count a value that the template made, and return it."""
        self.total += measure(value)
        if self.total > MAX_TOTAL:
            _too_large()
        return value


def _too_large() -> NoReturn:
    raise TemplateLimit(f"the chat template makes values of more than {MAX_VALUE} characters")


def measure(value: Any) -> int:
    """Size of a value with all that it contains; TemplateLimit above `MAX_VALUE`. O(size), no recursion."""
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += NODE * len(item)
            pending += item.keys()
            pending += item.values()
        elif isinstance(item, (list, tuple)):
            total += NODE * len(item)
            pending += item
        if total > MAX_VALUE:
            _too_large()
    return total


def _check_product(name: str, first: Any, others: Iterable[Any]) -> None:
    """TemplateLimit if an operation of `MULTIPLYING`, on these arguments, could make too large a value."""
    if isinstance(first, str) and name in {"format", "%"}:
        widths = re.findall(r"\d+", " ".join(_FORMAT_SPEC.findall(first)))
        if sum(map(float, widths)) > MAX_VALUE:
            _too_large()
    factor = 1 + sum(abs(other) if isinstance(other, int) else measure(other) for other in others)
    if (1 + measure(first)) * factor > MAX_VALUE:
        _too_large()


def _check_replace(text: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    strings = isinstance(text, str) and isinstance(old, str) and isinstance(new, str)
    if strings and len(text) + text.count(old) * len(new) > MAX_VALUE:
        _too_large()


class _Hooks(visitor.NodeTransformer):
    """Routes loops, concatenations and list or dict displays through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("_each", node.iter)  # type: ignore[arg-type]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_spend", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_spend", node)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> NoReturn:
        """Escaped text cannot be followed, and no prompt is HTML."""
        raise jinja2.TemplateSyntaxError("{% autoescape %} is not supported", node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _through("_spend", node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only passes its body through."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body, lineno=line)

    def body(self, caller: runtime.Macro) -> str:
        return str(caller())


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Hugging Face's dialect of Jinja, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self._budget = _Budget()
        extensions = [_Generation, jinja2.ext.loopcontrols]
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=extensions,
            finalize=self._printed,
        )
        allowed = {name: self.filters[name] for name in FILTERS.split()}
        self.filters = {name: self._limited(name, function) for name, function in allowed.items()}
        self.filters |= {name: self._limited(name, function) for name, function in OWN.items()}
        self.filters |= {"_each": self._each, "_concat": self._concat, "_spend": self._budget.spend}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The text of one rendering, traced if a variable is (see `text/origin`).

        Raises TemplateLimit, or whatever the template's expressions raise.
        """
        self._budget.start()
        try:
            pieces, n_chars = [], 0
            for piece in template.generate(variables):
                self._budget.tick()
                pieces.append(piece)
                n_chars += len(piece)
                if n_chars > MAX_OUTPUT_CHARS:
                    raise TemplateLimit(f"the chat template writes more than {MAX_OUTPUT_CHARS} characters")
            return joined(pieces)
        finally:
            self._budget.stop()

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, without string methods that multiply sizes in ways that cannot be foreseen."""
        return attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own `str.format`, checked before it runs."""
        owner = getattr(value, "__self__", None)
        bare = plain(owner).format if isinstance(owner, TracedText) and value.__name__ == "format" else value
        wrapped = super().wrap_str_format(bare)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_product("format", owner, [*args, *kwargs.values()])
            if isinstance(owner, Markup):
                return derived(wrapped(*args, **kwargs), [owner, args, kwargs])  # type: ignore[no-any-return]

            def make(values: list[Any]) -> str:
                return wrapped(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

            return formatted(make, owner, [*args, *kwargs.values()])

        return checked

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template comes through here. (Names as in Jinja: a template may pass any keyword.)"""
        __self._budget.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            named = {key: value for key, value in kwargs.items() if key not in _ADDED_BY_JINJA}
            if name in MULTIPLYING:
                _check_product(name, owner, [*args, *named.values()])
            elif name == "replace":
                _check_replace(owner, *args, **named)
            return __self._budget.spend(__self._of_text(__context, __obj, args, kwargs))
        return __self._budget.spend(super().call(__context, __obj, *args, **kwargs))

    def _of_text(self, context: runtime.Context, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a method of a str. One of the template's own text keeps what it does to traced arguments."""
        owner = method.__self__
        if type(owner) is str and blend([args, kwargs]) != Origin.TEMPLATE:
            method = getattr(TracedText(owner, Origin.TEMPLATE), method.__name__)
        result = super().call(context, method, *args, **kwargs)
        return result if isinstance(method.__self__, TracedText) else derived(result, [owner, args, kwargs])

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The operators of `intercepted_binops`."""
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and integers and left.bit_length() * right > MAX_BITS:
            _too_large()
        if operator == "%" and isinstance(left, str):
            _check_product(operator, left, right if isinstance(right, tuple) else [right])
        elif operator == "*" and not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            first, other = (right, left) if isinstance(left, int) else (left, right)
            _check_product(operator, first, [other])
        if operator == "%" and isinstance(left, str) and not isinstance(left, Markup):
            result: Any = filled(left, right)
        else:
            result = super().call_binop(context, operator, left, right)
        if isinstance(result, str) and not is_traced(result):
            result = derived(result, [left, right])
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            _too_large()
        return self._budget.spend(result)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Hooks().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks before and counts after. Its arguments start with what Jinja itself passes, if any."""
        n_own = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self._budget.tick()
            given = [list(arg) if isinstance(arg, Iterator) else arg for arg in args[n_own:]]
            if name in MULTIPLYING:
                _check_product(name, given[0], [*given[1:], *kwargs.values()])
            elif name == "replace":
                _check_replace(*given, **kwargs)
            result = function(*args[:n_own], *given, **kwargs)
            if isinstance(result, str) and name not in PASSING and not (name in FOLLOWED and is_traced(result)):
                result = derived(result, [given, kwargs])
            return self._budget.spend(result)

        return limited

    def _each(self, items: Any) -> Any:
        """Iterate with an eye on the clock; values that are not iterable fail as they would without it."""
        tick = self._budget.tick
        for item in items:
            tick()
            yield item

    def _printed(self, value: Any) -> str:
        """What `{{ value }}` writes."""
        text = as_text(value)
        return text if isinstance(value, str) else str(self._budget.spend(text))

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro, a block or `{% set %}` has written."""
        pieces = list(pieces)
        if sum(map(len, pieces)) > MAX_VALUE:
            _too_large()
        return str(self._budget.spend(joined(pieces)))

    def _concat(self, parts: list[Any]) -> str:
        """The `~` operator."""
        measure(parts)
        return str(self._budget.spend(joined(map(as_text, parts))))


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_product("strftime", form, ["longest of one field"])
    return str(derived(datetime.datetime.now().strftime(form), form))
