"""One list selects and displays: the first of the catalogue that takes the inputs runs, and the others say why not."""

from __future__ import annotations

import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels import catalog, hopper, native, selector
from quire.kernels.catalog import Implementation, Slower
from quire.kernels.gemm import composed
from quire.kernels.gemm import hopper as gemm_hopper
from quire.kernels.gemm.plan import MAX_NORM_ROWS, ProductShape, plan
from quire.kernels.norm import hopper as norm_hopper

X = torch.zeros(3, 8)
BF16 = torch.bfloat16


class Op:
    """An op 'turn' of three implementations: 'fast' and 'middle' with conditions, 'reference' without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.asked: list[str] = []
        self.entries: dict[str, Implementation] = {}

    def add(self, name: str, condition: Callable[..., object] | None, kind: str = "obstacle", **fields: object) -> None:
        module = types.ModuleType(f"quire.kernels.turn.{name}")
        module.left = module.right = lambda *arguments: name
        if condition is not None:

            def ask(*arguments: object) -> object:
                self.asked.append(name)
                return condition(*arguments)

            setattr(module, kind, ask)
        self.monkeypatch.setitem(sys.modules, module.__name__, module)
        given = {"functions": ("left",), "devices": ("cpu",), "needs": "", **fields}
        self.entries[name] = Implementation("turn", name, **given)
        self.monkeypatch.setattr(catalog, "CATALOGUE", tuple(self.entries.values()))

    def runs(self, x: torch.Tensor = X, function: str = "left") -> object:
        return selector.select("turn", function, x)(x)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    selector.candidates.cache_clear()
    yield Op(monkeypatch)
    selector.candidates.cache_clear()


def test_the_first_that_takes_the_inputs_runs_and_what_is_behind_it_is_not_asked(op: Op) -> None:
    op.add("fast", lambda x: "x is wide" if x.shape[1] > 8 else None)
    op.add("middle", lambda x: "x is long" if len(x) > 3 else None)
    op.add("reference", None)
    assert op.runs() == "fast" and op.asked == ["fast"]
    assert op.runs(torch.zeros(3, 9)) == "middle"
    assert op.runs(torch.zeros(4, 9)) == "reference"
    obstacles = {name: one.obstacle(X.dtype, torch.zeros(4, 9)) for name, one in op.entries.items()}
    assert obstacles == {"fast": "x is wide", "middle": "x is long", "reference": None}


def test_a_machine_a_type_and_a_missing_function_pass_an_implementation_by(op: Op) -> None:
    op.add("fast", None, machine_obstacle=lambda: "no such machine")
    op.add("middle", None, dtypes=(torch.float32,))
    op.add("torch", None, functions=("right",))
    op.add("reference", None, functions=("left", "right"))
    assert op.runs() == "middle" and op.runs(X.double()) == "reference" and op.runs(function="right") == "torch"
    assert op.entries["fast"].obstacle(X.dtype, X) == "no such machine"
    assert op.entries["middle"].obstacle(torch.float64, X) == "it takes float32, not torch.float64"


def test_what_a_condition_prepares_runs_in_the_place_of_the_module(op: Op) -> None:
    op.add("fast", lambda x: "too few" if len(x) < 3 else lambda *arguments: "prepared", kind="prepare")
    op.add("reference", None)
    assert op.runs() == "prepared" and op.runs(X[:1]) == "reference"
    assert op.entries["fast"].obstacle(X.dtype, X) is None
    assert selector.first(selector.candidates("turn", "left", X.device, X.dtype), X)(X) == "prepared"


def test_a_loss_that_matters_is_said_once_for_each_reason(op: Op, caplog: pytest.LogCaptureFixture) -> None:
    wide, many = "x is wide", Slower("many rows")
    op.add("fast", lambda x: many if len(x) > 3 else wide if x.shape[1] > 8 else None, missed=True)
    op.add("middle", lambda x: "x is empty" if not len(x) else None)
    op.add("reference", None)
    with caplog.at_level(logging.WARNING, "quire.kernels"):
        for _ in range(2):
            op.runs(), op.runs(torch.zeros(4, 9)), op.runs(torch.zeros(2, 9))
        assert op.runs(torch.zeros(0, 9)) == "reference"
    assert [record.getMessage() for record in caplog.records] == [
        "turn: 'middle' runs instead of the faster 'fast' (x is wide)",
        "turn: 'reference' runs instead of the faster 'fast' (x is wide)",
    ]


def test_a_machine_that_cannot_run_the_best_is_said_too(op: Op, caplog: pytest.LogCaptureFixture) -> None:
    op.add("fast", None, machine_obstacle=lambda: "no such machine", missed=True)
    op.add("reference", None)
    op.runs(), op.runs()
    assert [record.getMessage() for record in caplog.records] == [
        "turn: 'reference' runs instead of the faster 'fast' (no such machine)"
    ]


def test_where_none_fits_the_error_has_every_reason(op: Op) -> None:
    op.add("fast", None, machine_obstacle=lambda: "no such machine", devices=("cpu", "cuda"))
    op.add("middle", lambda x: "x is long")
    with pytest.raises(ConfigError, match="of turn can run this: fast: no such machine; middle: x is long"):
        op.runs()
    with pytest.raises(ConfigError, match="turn has no kernel for device 'meta': use 'cpu' or 'cuda'"):
        op.runs(X.to("meta"))


def test_on_cuda_nothing_falls_back_to_the_reference() -> None:
    for name in catalog.OPS:
        for function in {function for entry in catalog.of(name) for function in entry.functions}:
            assert "reference" not in [entry.name for entry in catalog.selectable(name, function, "cuda")]


def test_every_implementation_has_its_functions() -> None:
    for entry in catalog.CATALOGUE:
        if entry.name != "triton" or importlib.util.find_spec("triton"):
            missing = [name for name in entry.functions if not hasattr(entry.load(), name)]
            assert not missing, f"{entry.module}: {missing}"


@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_what_is_shown_first_is_what_runs(dtype: torch.dtype) -> None:
    """For each function of the rows, by the reasons that `quire kernels` would show."""
    x, w = torch.zeros(2, 16, dtype=dtype), torch.zeros(16, dtype=dtype)
    heads = torch.zeros(2, 16, dtype=dtype)
    for name, function, arguments in (
        ("norm", "rms_norm", (x, w)),
        ("norm", "layer_norm", (x, w, None)),
        ("norm", "layer_norm", (x, heads, None)),
        ("act", "silu_mul", (x,)),
        ("act", "activate", (x,)),
        ("gemm", "linear", (x, heads, None, None, None, False, None)),
        ("sample", "choose_by", (x,)),
        ("kvstore", "copy_pages", (x,)),
    ):
        listed = catalog.selectable(name, function, "cpu")
        shown = next(entry for entry in listed if entry.obstacle(dtype, *arguments) is None)
        assert selector.select(name, function, *arguments) is getattr(shown.load(), function), (name, function)


def test_torch_runs_where_the_library_does_not_take_the_type() -> None:
    best = "cpu" if native.library() is not None else "reference"
    for dtype, wanted in ((BF16, best), (torch.float64, "reference")):
        found = selector.select("norm", "rms_norm", X.to(dtype), X[0].to(dtype))
        assert found.__module__ == f"quire.kernels.norm.{wanted}"


class Far(torch.Tensor):
    """A tensor in this machine's memory that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def as_on_hopper(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection as on a Hopper GPU, for tensors of the host; nothing is compiled."""
    selectable = catalog.selectable
    monkeypatch.setattr(catalog, "selectable", lambda name, function, device: selectable(name, function, "cuda"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **kinds: torch.device("cuda"))
    monkeypatch.setattr(hopper, "machine_obstacle", lambda: None)
    monkeypatch.setattr(norm_hopper.hopper_rows, "obstacle", lambda dtype: None)


def test_rows_of_a_norm_beyond_the_limit_go_to_triton_without_a_word(
    as_on_hopper: None, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")

    def runs(n: int, start: int = 0) -> str:
        x = torch.zeros(n, 72, dtype=BF16)[:, start : start + 64]
        return selector.select("norm", "rms_norm", x, torch.zeros(64, dtype=BF16)).__module__.rpartition(".")[2]

    assert runs(norm_hopper.MAX_ROWS) == "hopper" and runs(norm_hopper.MAX_ROWS + 1) == "triton" and not caplog.text
    assert runs(2, 1) == "triton" and "not at a multiple of 16 bytes" in caplog.text


def test_a_norm_that_cannot_be_fused_is_a_launch_of_its_own(
    as_on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel still runs the product; where it is not for the kernel either, all is left to torch."""
    asked: list[tuple[object, ...]] = []

    def prepared(*key: object) -> gemm_hopper.Launch | str:
        asked.append(key)
        return "torch is faster" if key[1] == 8 else launch

    def run(x: torch.Tensor, w: torch.Tensor, bias: object, norm: object, *rest: object) -> torch.Tensor:
        assert norm is None
        return x

    made = plan(ProductShape(1, 64, 64), 132)
    assert made is not None
    launch = gemm_hopper.Launch(lambda *arguments: 0, made)
    monkeypatch.setattr(gemm_hopper.Launch, "__call__", lambda self, *arguments: run(*arguments))
    monkeypatch.setattr(gemm_hopper, "_prepared", prepared)
    monkeypatch.setattr(gemm_hopper, "rms_norm", lambda x, weight, eps: x + 1)
    norm = (torch.zeros(64, dtype=BF16), 1e-5)
    few, many = (torch.zeros(n, 64, dtype=BF16).as_subclass(Far) for n in (2, MAX_NORM_ROWS + 1))
    w, narrow = torch.zeros(64, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)

    assert selector.select("gemm", "linear", few, w, None, norm, None, False, None) is launch and asked[-1][5] is True
    found = selector.select("gemm", "linear", many, w, None, norm, None, False, None)
    assert asked[-1][5] is False and torch.equal(found(many, w, None, norm, None, False, None), many + 1)
    assert "fused for at most" in str(gemm_hopper.prepare(many, w, None, norm, None, False, None, apart=False))
    assert selector.select("gemm", "linear", many, narrow, None, norm, None, False, None) is composed.linear
    n_asked = len(asked)
    assert selector.select("gemm", "linear", many[:0], w, None, norm, None, False, None) is composed.linear
    assert len(asked) == n_asked, "no rows, no kernel"
