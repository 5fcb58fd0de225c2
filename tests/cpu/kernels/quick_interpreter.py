"""Triton's interpreter without what it does again and again: import this before kernels run with TRITON_INTERPRET=1.

At every call of a function inside a kernel it looks through all of its language for what to replace by its own, though
the launch has replaced that: here it is done once a launch. Integers are computed again in 64 bits for an assertion
that is dropped, since only `debug` keeps it. The table of NumPy's types is made anew at each use. Each value computes
and checks its shape again, and pairs of one shape are looked through for what to broadcast: here each shape is known
from its first use, when it was checked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any

import brief  # noqa: F401
from triton.language import core, semantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, _patch_lang

_launch, _numpy_type = GridExecutor.__call__, interpreter._get_np_dtype
_numpy_types: dict[str, Any] = {}
_done: set[frozenset[str]] = set()
"""Modules that functions see the language as, of which the running launch has replaced the contents."""


@functools.cache
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


@functools.cache
def _block(shape: tuple[int, ...]) -> tuple[Any, int]:
    """Shape and numel of a `block_type`."""
    checked = core.tuple(core._unwrap_shape(shape))
    if not shape:
        raise TypeError("0d block_type is forbidden")
    return checked, core.validate_block_shape(checked)


@functools.cache
def _of_value(shape: tuple[int, ...]) -> tuple[Any, core.constexpr]:
    """Shape and numel of a `tensor`."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def block(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
    sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
    self.element_ty, (self.shape, self.numel) = element_ty, _block(tuple(sizes))


def value(self: core.tensor, handle: Any, type: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_value(tuple(type.shape.values) if type.is_block() else ())


def broadcast(self: Any, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
    are_blocks = lhs.type.is_block(), rhs.type.is_block()
    if are_blocks == (False, False):
        return lhs, rhs
    if are_blocks == (True, True):
        left, right = lhs.type.shape.values, rhs.type.shape.values
        if left == right:
            return lhs, rhs
        if len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True)):
            shape = [max(sizes) for sizes in zip(left, right, strict=True)]
            return _widened(self, lhs, shape), _widened(self, rhs, shape)
    return _broadcast(self, lhs, rhs)


def _widened(self: Any, x: core.tensor, shape: list[int]) -> core.tensor:
    if x.type.shape.values == shape:
        return x
    return self.make_tensor(self.builder.create_broadcast(x.handle, shape), core.block_type(x.type.scalar, shape))


def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, called)


_broadcast = semantic.TritonSemantic.broadcast_impl_value
semantic.TritonSemantic.broadcast_impl_value = broadcast
core.block_type.__init__, core.tensor.__init__ = block, value
core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
GridExecutor.__call__, InterpretedFunction.__call__ = launch, call
interpreter._get_np_dtype, interpreter._patch_attr = numpy_type, patch_attr
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
