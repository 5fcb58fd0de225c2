"""Triton's interpreter without what it does again and again: import this before kernels run with TRITON_INTERPRET=1.

At every call of a function inside a kernel it looks through all of its language for what to replace by its own, though
the launch has replaced that: here it is done once a launch. Integers are computed again in 64 bits for an assertion
that is dropped, since only `debug` keeps it. The table of NumPy's types is made anew at each use.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, _patch_lang

_launch, _numpy_type = GridExecutor.__call__, interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}
_done: set[frozenset[str]] = set()
"""Modules that functions see the language as, of which the running launch has replaced the contents."""


def _seen_by(function: types.FunctionType) -> frozenset[str]:
    names = (value.__name__ for value in function.__globals__.values() if isinstance(value, types.ModuleType))
    return frozenset({"triton.language", "triton.language.core"}.intersection(names))


def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    _done.clear()
    _launch(self, *args, **kwargs)


def call(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    modules = _seen_by(self.fn)
    if modules not in _done:
        _patch_lang(self.fn)
        _done.add(modules)
    return self.rewrite()(*args, **kwargs)


def numpy_type(kind: Any) -> Any:
    if kind.name not in _numpy_types:
        _numpy_types[kind.name] = _numpy_type(kind)
    return _numpy_types[kind.name]


GridExecutor.__call__, InterpretedFunction.__call__ = launch, call
interpreter._get_np_dtype = numpy_type
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
