"""Expressions: operators and their errors, derivatives against autograd, and the same value on every target."""

from __future__ import annotations

import importlib.util
import operator
import pathlib
import random
import re
import subprocess
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire.kernels.attention.variant import Site, Variant, expression, lowering, variants
from quire.kernels.attention.variant.expression import Expr, Kind, constant, derivative, where

N = 16
LEAVES = {
    ("value", "x"): torch.linspace(-2.0, 2.0, N, dtype=torch.float64),
    ("scalar", "cap"): torch.tensor(1.7, dtype=torch.float64),
    ("scalar", "every"): torch.tensor(3),
    ("site", "k_pos"): torch.arange(N) * 5 % 13,
    ("site", "q_pos"): torch.arange(N) + 3,
    ("load", "slopes"): torch.linspace(0.1, 1.2, 40),
    ("load", "table"): torch.arange(40, dtype=torch.int32) * 7 % 11,
    ("load", "mask"): torch.arange(40) % 3 == 0,
}
KINDS = {"x": Kind.FLOAT, "cap": Kind.FLOAT, "every": Kind.INT, "k_pos": Kind.INT, "q_pos": Kind.INT}
LOADS = {"slopes": Kind.FLOAT, "table": Kind.INT, "mask": Kind.BOOL}
X = Expr("value", Kind.FLOAT, name="x")
K = Expr("site", Kind.INT, name="k_pos")


# Random trees ---------------------------------------------------------------------------------------------------------
# A tree is a nested tuple. `build` makes it of expressions or of torch tensors: the two must have the same values.

FLOATS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda m, a, b: a + b,
    "sub": lambda m, a, b: a - b,
    "mul": lambda m, a, b: a * b,
    "div": lambda m, a, b: a / (1.0 + b * b),
    "neg": lambda m, a, b: -a,
    "rsub": lambda m, a, b: 2 - a,
    "rdiv": lambda m, a, b: 1 / (2.0 + a * a),
    "minimum": lambda m, a, b: m.minimum(a, b),
    "maximum": lambda m, a, b: m.maximum(a, b),
    "absolute": lambda m, a, b: m.absolute(a),
    "tanh": lambda m, a, b: m.tanh(a),
    "sigmoid": lambda m, a, b: m.sigmoid(a),
    "exp": lambda m, a, b: m.exp(-(a * a)),
    "log": lambda m, a, b: m.log(a * a + 0.5),
    "sqrt": lambda m, a, b: m.sqrt(a * a + 0.25),
    "sin": lambda m, a, b: m.sin(a),
    "cos": lambda m, a, b: m.cos(a),
}
INTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "iadd": lambda m, a, b: a + b,
    "imul": lambda m, a, b: (a % 8) * (b % 8),
    "idiv": lambda m, a, b: (a + b) // 7,
    "imod": lambda m, a, b: (a + 2 * b) % 5,
    "imin": lambda m, a, b: m.minimum(a, b),
}
BOOLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{name: lambda m, a, b, name=name: getattr(operator, name)(a, b) for name in expression.COMPARISONS},
    "both": lambda m, a, b: (a < b) & (b > 0),
    "either": lambda m, a, b: (a < b) | ~(b >= 1),
}


def tree(rng: random.Random, kind: str, depth: int, smooth: bool = True) -> tuple[Any, ...]:
    """A random tree of this kind: float, int or bool. Not smooth: without x, as an int of x has no derivative."""
    below = max(depth - 1, 0)
    if depth == 0 and kind != "bool":
        names = {"float": ["x", "x", "cap", 0.3, -1.5], "int": ["k_pos", "q_pos", "every", 2]}[kind]
        return ("leaf", rng.choice(names if smooth or kind == "int" else names[2:]))
    if rng.random() < 0.2:
        return ("load", {"float": "slopes", "int": "table", "bool": "mask"}[kind], tree(rng, "int", below, False))
    smooth = smooth and kind != "int"
    if kind != "bool" and rng.random() < 0.15:
        return ("where", *(tree(rng, each, below, smooth) for each in ("bool", kind, kind)))
    if kind == "float" and rng.random() < 0.15:
        return ("as_float", tree(rng, "int", below))
    ops = {"float": FLOATS, "int": INTS, "bool": BOOLS}[kind]
    side = rng.choice(["float", "int"]) if kind == "bool" else kind
    return (rng.choice(sorted(ops)), *(tree(rng, side, below, smooth) for _ in range(2)))


def build(node: tuple[Any, ...], m: Any) -> Any:
    """The tree in a module of functions: `expression`, or tensors."""
    op, *args = node
    if op == "leaf":
        return m.leaf(args[0])
    if op == "load":
        return m.load_at(args[0], build(args[1], m) % 40)
    below = [build(arg, m) for arg in args]
    if op in ("where", "as_float"):
        return getattr(m, op)(*below)
    return (FLOATS | INTS | BOOLS)[op](m, *below)


def as_expr(name: str | float) -> Any:
    if not isinstance(name, str):
        return constant(name)
    return Expr(next(op for op, known in LEAVES if known == name), KINDS[name], name=name)


SYMBOLS = types.SimpleNamespace(
    **{name: getattr(expression, name) for name in (*expression.FUNCTIONS, "minimum", "maximum", "absolute", "where")},
    as_float=expression.as_float,
    leaf=as_expr,
    load_at=lambda name, index: expression.load(name, index, LOADS[name]),
)


def torch_module(x: torch.Tensor) -> Any:
    """The same functions on tensors; x stands for the value."""
    leaves = {name: value for (_, name), value in LEAVES.items()} | {"x": x}
    return types.SimpleNamespace(
        **{name: getattr(torch, name) for name in (*expression.FUNCTIONS, "minimum", "maximum", "where")},
        absolute=torch.abs,
        as_float=lambda a: a.double(),
        leaf=lambda name: leaves[name] if isinstance(name, str) else torch.tensor(name),
        load_at=lambda name, index: leaves[name].double()[index] if name == "slopes" else leaves[name][index],
    )


@settings(max_examples=150, derandomize=True)
@given(st.integers(0, 10**9), st.integers(0, 6))
def test_values_and_derivatives_are_those_of_torch(seed: int, depth: int) -> None:
    shape = tree(random.Random(seed), "float", depth)
    x = LEAVES["value", "x"].clone().requires_grad_()
    expected = build(shape, torch_module(x)).double().expand(N)
    nearby = build(shape, torch_module(x.detach() * (1 + 1e-12))).double().expand(N)
    assume(torch.allclose(nearby, expected.detach(), rtol=1e-8, atol=1e-8))  # the sine of 1e9 is only noise
    expr = expression.as_float(build(shape, SYMBOLS))
    got = lowering.evaluate(expr, LEAVES, torch.float64)
    torch.testing.assert_close(got.expand(N), expected.detach(), rtol=1e-6, atol=1e-6)
    slope = lowering.evaluate(derivative(expr), LEAVES, torch.float64).expand(N)
    wanted = torch.zeros(N, dtype=torch.float64)
    if expected.requires_grad:
        (wanted,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-5)


def test_constants_are_float64_in_a_float64_reference() -> None:
    got = lowering.evaluate(X * 0.1, LEAVES, torch.float64)
    assert torch.equal(got, LEAVES["value", "x"] * 0.1)


def test_integers_and_booleans_evaluate_as_such() -> None:
    for seed in range(100):
        for kind, dtype in (("int", torch.int64), ("bool", torch.bool)):
            shape = tree(random.Random(seed), kind, 3)
            got = lowering.evaluate(build(shape, SYMBOLS), LEAVES, torch.float32)
            assert got.dtype == dtype
            assert bool((got == build(shape, torch_module(LEAVES["value", "x"]))).all()), shape


# Source text ----------------------------------------------------------------------------------------------------------

TREES = [tree(random.Random(seed), "float", seed % 6) for seed in range(60)]
NAMES = {key: key[1] for key in LEAVES}


def float32_values(exprs: list[Expr]) -> torch.Tensor:
    narrow = {key: value.float() if value.is_floating_point() else value for key, value in LEAVES.items()}
    return torch.stack([lowering.evaluate(expr, narrow, torch.float32).expand(N) for expr in exprs])


def programs() -> list[Expr]:
    derivatives = [derivative(expression.as_float(build(shape, SYMBOLS))) for shape in TREES[:20]]
    infinite = where(K < 6, X, float("-inf"))
    return [*(expression.as_float(build(shape, SYMBOLS)) for shape in TREES), *derivatives, infinite]


PRELUDE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#define FUNCTION(name) static float quire_##name(float x) { return std::name(x); }
FUNCTION(exp) FUNCTION(log) FUNCTION(tanh) FUNCTION(sqrt) FUNCTION(sin) FUNCTION(cos)
static float quire_sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
template <class T> float quire_float(T x) { return float(x); }
template <class T> T quire_div(T a, T b) { return a / b; }
static bool quire_not(bool x) { return !x; }
static bool quire_and(bool a, bool b) { return a && b; }
static bool quire_or(bool a, bool b) { return a || b; }
template <class T> T quire_minimum(T a, T b) { return std::min(a, b); }
template <class T> T quire_maximum(T a, T b) { return std::max(a, b); }
template <class T> T quire_where(bool c, T a, T b) { return c ? a : b; }
template <class T> T quire_load(const T* p, int i) { return p[i]; }
"""


def test_c_source_computes_the_same(tmp_path: pathlib.Path) -> None:
    exprs = programs()
    types_of = {torch.float64: "float", torch.float32: "float", torch.int64: "int", torch.int32: "int"}
    lines = [PRELUDE]
    for (_, name), value in LEAVES.items():
        numbers = ", ".join(str(float(v)) if value.is_floating_point() else str(int(v)) for v in value.flatten())
        lines.append(f"static const {types_of.get(value.dtype, 'bool')} {name}_[] = {{{numbers}}};")
    for i, expr in enumerate(exprs):
        lines.append(f"static float f{i}(int lane) {{")
        for (op, name), value in LEAVES.items():
            at = "" if op == "load" else "[lane]" if value.dim() else "[0]"
            lines.append(f"[[maybe_unused]] const auto {name} = {name}_{at};")
        statements, text = lowering.source(expr, lowering.C, NAMES)
        lines += [*statements, f"return {text};", "}"]
    calls = "".join(f'std::printf("%.9g\\n", f{i}(lane));' for i in range(len(exprs)))
    lines.append(f"int main() {{ for (int lane = 0; lane < {N}; lane++) {{ {calls} }} }}")
    (tmp_path / "trees.cpp").write_text("\n".join(lines))
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Werror", "-Wno-tautological-compare", "trees.cpp", "-o", "trees"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "trees"], capture_output=True, text=True, check=True).stdout.split()
    got = torch.tensor([float(number) for number in printed]).view(N, -1).T
    torch.testing.assert_close(got, float32_values(exprs), rtol=2e-4, atol=2e-4)


class Pointer:
    """A tensor parameter in Triton's source: an address that takes an offset."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __add__(self, index: torch.Tensor) -> torch.Tensor:
        return self.values[index]


def pair(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: function(*(torch.as_tensor(arg) for arg in args))


def test_triton_source_computes_the_same(tmp_path: pathlib.Path) -> None:
    """The text is run as Python over tensors; that Triton compiles it is shown by the kernels' own tests."""
    exprs = programs()
    names = [name for _, name in LEAVES]
    lines = []
    for i, expr in enumerate(exprs):
        statements, text = lowering.source(expr, lowering.TRITON, NAMES)
        lines += [f"def f{i}(tl, {', '.join(names)}):", *(f"    {line}" for line in statements), f"    return {text}"]
    (tmp_path / "trees.py").write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("trees", tmp_path / "trees.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    elementwise = {name: pair(getattr(torch, name)) for name in ("exp", "log", "sigmoid", "sqrt", "sin", "cos")}
    choices = {name: pair(getattr(torch, name)) for name in ("minimum", "maximum", "where")}
    tl = types.SimpleNamespace(**elementwise, **choices, load=lambda values: values, int32=torch.int32)
    given_ = {
        name: Pointer(value) if op == "load" else value.float() if value.is_floating_point() else value.int()
        for (op, name), value in LEAVES.items()
    }
    got = [torch.as_tensor(getattr(module, f"f{i}")(tl, **given_)).float().expand(N) for i in range(len(exprs))]
    torch.testing.assert_close(torch.stack(got), float32_values(exprs), rtol=2e-4, atol=2e-4)


def test_a_shared_node_is_computed_once() -> None:
    slow = expression.exp(X)
    statements, _ = lowering.source(slow * slow + slow, lowering.C, {("value", "x"): "x"})
    assert sum("exp" in line for line in statements) == 1


def test_a_leaf_without_source_is_an_error() -> None:
    with pytest.raises(KeyError):
        lowering.source(X + K, lowering.C, {("value", "x"): "x"})
    with pytest.raises(KeyError):
        lowering.evaluate(X + K, {("value", "x"): torch.zeros(1)}, torch.float32)


# Kinds and errors -----------------------------------------------------------------------------------------------------


def test_kinds() -> None:
    assert (K + 1).kind is Kind.INT
    assert (K + 1.0).kind is Kind.FLOAT
    assert (K / 2).kind is Kind.FLOAT
    assert (-K).kind is Kind.INT
    assert (K > 1).kind is Kind.BOOL
    assert where(K == 1, 1, 2.0).kind is Kind.FLOAT
    assert expression.load("table", K, Kind.INT).kind is Kind.INT


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bool(X), "no truth value yet: use where"),
        (lambda: 0 < K < 5, "no truth value yet: use where"),
        (lambda: K > 0 and K < 5, "no truth value yet: use where"),
        (lambda: X & (K > 1), "(value x) is float, but & | ~ and where's condition take booleans"),
        (lambda: ~K, "(site k_pos) is int, but & | ~"),
        (lambda: where(X, 1, 2), "(value x) is float, but"),
        (lambda: where(K > 1, K > 2, 1.0), "convert with where(condition, 1.0, 0.0)"),
        (lambda: (K > 1) + (K > 2), "add of booleans"),
        (lambda: (K > 1) * 2.0, "convert with where(condition, 1.0, 0.0)"),
        (lambda: X % 2, "mod takes ints"),
        (lambda: K // 2.0, "floordiv takes ints"),
        (lambda: X + "2", "'2' cannot stand in a hook"),
        (lambda: X + torch.ones(2), "cannot stand in a hook"),
        (lambda: X == "2", "eq of (value x) with '2'"),
        (lambda: expression.load("slopes", X, Kind.FLOAT), "parameter 'slopes' is indexed with (value x), which is fl"),
        (lambda: expression.rotate_half(X * 2.0), "rotate_half takes the x that the transform is given, not (mul"),
        (lambda: derivative(expression.as_float(X > 0.0)), "no derivative of (gt (value x) (const 0.0))"),
    ],
)
def test_what_cannot_be_said_is_an_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        (
            {"key_transform": lambda x, site, p: x * site.q_pos},
            AttributeError,
            "key_transform has no site.q_pos: it of",
        ),
        ({"logits_transform": lambda x, site, p: expression.rotate_half(x)}, TypeError, "logits_transform uses rot"),
        ({"output_transform": lambda x, site, p: x * site.q_pos}, AttributeError, "output_transform has no site.q_pos"),
        ({"logits_transform": lambda x, site, p: x * site.lse}, AttributeError, "logits_transform has no site.lse"),
        (
            {"logits_mask": lambda site, p: site.row > 1},
            AttributeError,
            "no site.row: it offers q_row, q_pos, k_pos, q",
        ),
        ({"logits_transform": lambda x, site, p: x * p.cup}, AttributeError, "no parameter 'cup': it has cap, slopes"),
        ({"logits_transform": lambda x, site, p: p.slopes[x]}, TypeError, "'slopes' is indexed with (value x)"),
        ({"logits_mask": lambda site, p: site.k_pos}, TypeError, "(site k_pos) is int, but & | ~"),
        ({"logits_transform": lambda x, site, p: None}, TypeError, "logits_transform returned None"),
        ({"logits_transform": lambda x, site, p: x if x > 0 else 0}, TypeError, "no truth value yet"),
    ],
)
def test_hooks_that_cannot_be_traced(hooks: dict[str, Any], error: type[Exception], message: str) -> None:
    variant = Variant(1.0, params={"cap": 2.0, "slopes": torch.ones(2)}, **hooks)
    with pytest.raises(error, match=re.escape(message)):
        _ = variant.program


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window -1 and n_first 0 must not be negative"),
        ({"n_first": 4}, "n_first 4 has no meaning without a window"),
        ({"params": {f"p{i}": 1.0 for i in range(9)}}, "9 scalar parameters: a variant has at most 8"),
        ({"params": {"a": torch.ones(2, dtype=torch.float64)}}, "'a' is torch.float64: use a contiguous tensor of"),
        ({"params": {"a": torch.ones(4, 4)[:, :2]}}, "use a contiguous tensor of"),
        ({"params": {"a": 1 << 25}}, "'a' is 33554432: integers reach to 16777216"),
    ],
)
def test_variants_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Variant(1.0, **arguments)


# Identity -------------------------------------------------------------------------------------------------------------


def test_text_is_the_tree() -> None:
    assert (K % 2 + 1.0 / X).text() == ("(add (float (mod (site k_pos) (const 2))) (div (const 1.0) (value x)))")
    assert where(~(K < 3), X, 0.5).text() == ("(where (not (lt (site k_pos) (const 3))) (value x) (const 0.5))")


def test_a_program_is_known_by_its_text() -> None:
    """These names are cache keys on disk: whoever changes them makes every machine build its kernels again."""
    program = variants.soft_cap(0.125, 30.0, window=64).program
    assert program.text() == (
        "causal=True windowed=True softmax=True\n"
        "logits_transform: (mul (scalar cap) (tanh (div (value x) (scalar cap))))\n"
        "scalars: cap:float\n"
        "tensors: "
    )
    assert program.digest() == "880fea30cc38303a"


def test_identity_does_not_depend_on_values() -> None:
    one = variants.soft_cap(0.125, 30.0, window=64).program.digest()
    assert variants.soft_cap(0.5, 50.0, window=128).program.digest() == one
    assert variants.soft_cap(0.125, 30.0).program.digest() != one
    assert variants.soft_cap(0.125, 30, window=64).program.digest() != one, "an int parameter is another kernel"
    slopes = [variants.alibi(1.0, torch.rand(n)).program.digest() for n in (4, 8)]
    assert slopes[0] == slopes[1]


def test_a_program_knows_what_it_reads() -> None:
    program = variants.learned_sinks(1.0, torch.ones(4)).program
    assert program.reads("lse") and program.reads("q_head") and not program.reads("k_pos")
    assert Site("logits_mask").k_pos.kind is Kind.INT
    assert variants.causal(1.0, window=4).built_in and not variants.alibi(1.0, torch.ones(2)).built_in


def test_shared_nodes_cost_once() -> None:
    """x * x two hundred times: a tree of 2^200 nodes, a graph of 201."""
    x = node = Expr("value", Kind.FLOAT, name="x")
    for _ in range(200):
        node = node * node
    assert len(list(node.walk())) == 201
    assert len(node.text()) < 10_000
    assert (x + x).text() == "(add (value x) (value x))"
    half = x * 0.5
    assert (half + half).text() == "#2 = (mul (value x) (const 0.5)); (add #2 #2)"


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda x, site, p: torch.tanh(x), r"torch.tanh cannot take .* use tanh\(x\) of quire.kernels.attention.var"),
        (lambda x, site, p: torch.nn.functional.relu(x), r"torch.relu cannot .* use maximum\(x, 0.0\)"),
        (lambda x, site, p: torch.where(site.k_pos < 3, x, 0.0), r"torch.where .* use where\(condition, a, b\)"),
        (lambda x, site, p: torch.clamp(x, -1.0, 1.0), r"torch.clamp .* use minimum\(maximum\(x, low\), high\)"),
        (lambda x, site, p: torch.erf(x), r"torch's erf cannot .* the functions exp, log, tanh.* of quire.kernels"),
        (lambda x, site, p: torch.zeros(3) + x, "parameters .tensors with an index"),
        (lambda x, site, p: np.tanh(x), r"numpy.tanh cannot .* use tanh\(x\)"),
        (lambda x, site, p: np.float64(2.0) * x, r"numpy's multiply cannot .* operators"),
        (lambda x, site, p: x.tanh(), r"no tanh\(\): use tanh\(x\)"),
        (lambda x, site, p: x.cosh(), "no attribute 'cosh'"),
    ],
)
def test_functions_of_other_libraries_are_refused_with_ours(hook: Callable[..., object], message: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=message):
        _ = Variant(1.0, logits_transform=hook).program


def test_every_function_that_is_named_instead_is_there() -> None:
    for name, instead in expression.INSTEAD.items():
        for called in re.findall(r"(\w+)\(", instead):
            assert callable(getattr(expression, called)), name
