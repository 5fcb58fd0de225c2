"""What is refused before weights are read, the table that says why, and that each proposed option would be taken."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.model import read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.engine.fit import FitCase, check_fit
from quire.planner.memory import Room

ARCH = read_arch(pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes/llama-3.1-8b")
GIB = 1 << 30
ITEMSIZES = {"float32": 4.0, "bfloat16": 2.0}
SCHEMES = {"int8": 1.0, "int4": 0.55}


@dataclasses.dataclass(frozen=True)
class Sizes:
    held_bytes: int
    peak_bytes: int
    address_bytes: int


def sizes_of(dtype: str, quantization: str) -> Sizes:
    full = int(ARCH.n_parameters * ITEMSIZES[dtype])
    held = int(ARCH.n_parameters * SCHEMES.get(quantization, ITEMSIZES[dtype]))
    return Sizes(held, held + GIB, full + GIB)


def case(room: Room, device: str = "cpu", **options: object) -> FitCase:
    config, is_cpu = EngineConfig(model="m", **options), device == "cpu"  # type: ignore[arg-type]
    room = dataclasses.replace(room, is_main=is_cpu)
    limits, kv_rounded = resolve(config, ARCH, device), "int8" if is_cpu else "fp8"
    return FitCase(config, limits, ARCH, room, sizes_of, rounds=is_cpu, kv_rounded=kv_rounded)


def refusal(one: FitCase) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_fit(one)
    return caught.value.message.splitlines()


def gib(text: str) -> float:
    return float(re.findall(r"([\d.]+) GiB", text)[0])


def taken(one: FitCase, line: str) -> FitCase:
    """The case with a proposed option."""
    flag, value = line.split()[:2]
    name = flag.removeprefix("--").replace("-", "_")
    return one.change(**{name: msgspec.convert(value, type(getattr(one.config, name)), strict=False)})


def test_what_fits_is_not_refused() -> None:
    """8 billion weights in bfloat16 on a machine of 24 GB; swap counts, and so does every limit alone."""
    check_fit(case(Room(24 * GIB, 20 * GIB)))
    check_fit(case(Room(24 * GIB, 12 * GIB, swap_bytes=8 * GIB)))
    check_fit(case(Room(24 * GIB, 10 * GIB), quantization="int8"))
    check_fit(case(Room(0, 0)))  # nothing is known of this machine
    check_fit(case(Room(80 * GIB, 79 * GIB), device="cuda"))


def test_the_refusal_names_what_was_given() -> None:
    """The engine of a server gets the hub's cache in the place of the hub's name."""
    one = case(Room(24 * GIB, 6 * GIB))
    for model, name in [("/c/models--org--a.b-8B/snapshots/0a1b", "org/a.b-8B"), ("/c/m", "/c/m"), ("demo", "demo")]:
        assert refusal(one.change(model=model))[0].startswith(f"{name} does not fit: ")
    assert refusal(one.change(model=""))[0].startswith("the demo model does not fit: ")


def test_the_table_adds_up() -> None:
    lines = refusal(case(Room(24 * GIB, 20 * GIB, own_bytes=GIB), max_model_len=65536))
    rows = {line[:19].strip(): line for line in lines[1:] if line.startswith("  ") and "--" not in line}
    terms = [gib(rows[name]) if "GiB" in rows[name] else 0.2 for name in ("weights", "KV, one sequence", "activations")]
    assert sum(terms) == pytest.approx(gib(rows["sum"]), abs=0.1)
    assert gib(rows["KV, one sequence"]) == pytest.approx(8.0, abs=0.01)
    assert gib(rows["available"]) == 20 and gib(rows["held by others"]) == 4
    assert "this process 1.00 GiB, the rest of the machine 3.00 GiB" in rows["held by others"]
    assert gib(lines[0]) == pytest.approx(gib(rows["sum"]) - 20, abs=0.02)


BOTH = ("quantization", "quantization")


@pytest.mark.parametrize(
    ("room", "device", "options", "flags"),
    [
        (Room(24 * GIB, 11 * GIB), "cpu", {}, BOTH),
        (Room(24 * GIB, 6 * GIB), "cpu", {}, ("quantization",)),
        (Room(24 * GIB, 20 * GIB), "cpu", {"max_model_len": 65536}, (*BOTH, "kv-cache-dtype", "max-model-len")),
        (Room(24 * GIB, 20 * GIB), "cpu", {"kv_cache_memory_bytes": "9GiB"}, (*BOTH, "kv-cache-memory-bytes")),
        (
            Room(24 * GIB, 20 * GIB),
            "cpu",
            {"num_gpu_blocks_override": 4500},
            (*BOTH, "kv-cache-dtype", "num-gpu-blocks-override"),
        ),
        (Room(64 * GIB, 20 * GIB), "cpu", {"dtype": "float32"}, (*BOTH, "dtype")),
        (Room(24 * GIB, 23 * GIB), "cuda", {"max_model_len": 65536}, ("max-model-len",)),
        (Room(18 * GIB, 18 * GIB), "cuda", {"max_model_len": 1024}, ("max-num-seqs", "gpu-memory-utilization")),
    ],
)
def test_each_proposal_would_be_taken(
    room: Room, device: str, options: dict[str, object], flags: tuple[str, ...]
) -> None:
    one = case(room, device, **options)
    lines = refusal(one)
    proposals = lines[lines.index("what would fit, each alone:") + 1 :]
    assert [line.split()[0].removeprefix("--") for line in proposals] == list(flags)
    for line in proposals:
        check_fit(taken(one, line))


def test_no_option_is_enough() -> None:
    assert "no option alone would be enough" in refusal(case(Room(4 * GIB, 3 * GIB)))[-1]
    last = refusal(case(Room(4 * GIB, 3 * GIB), "cuda"))[-1]
    assert "--quantization" not in last, "a GPU does not take it"


def test_the_limit_on_address_space() -> None:
    """All matrices are mapped before one is rounded, so rounding does not help."""
    room = Room(64 * GIB, 60 * GIB, address_bytes=12 * GIB)
    lines = refusal(case(room, quantization="int4"))
    assert any("ulimit -v" in line and "12.00 GiB" in line for line in lines)
    assert not any("--quantization int" in line and "weights of" in line for line in lines)


def test_memory_of_others_is_named_as_that_on_a_gpu() -> None:
    """A second engine: what the first one holds is not called weights."""
    lines = refusal(case(Room(80 * GIB, 8 * GIB), "cuda"))
    weights, others = (next(line for line in lines if name in line) for name in ("weights", "held by others"))
    assert gib(weights) == pytest.approx(14.96, abs=0.01) and gib(others) == 72


def test_what_ranks_cannot_share_is_not_proposed() -> None:
    def sizes(dtype: str, quantization: str) -> Sizes:
        if quantization == "int4":
            raise ConfigError("the 48 inputs of one rank of 2 are not a multiple of 64")
        return sizes_of(dtype, quantization)

    lines = refusal(dataclasses.replace(case(Room(24 * GIB, 12 * GIB)), sizes_of=sizes))
    assert any("--quantization int8" in line for line in lines) and not any("int4" in line for line in lines)


def test_copies_of_experts_are_told_of() -> None:
    eplb = {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    lines = refusal(case(Room(8 * GIB, 8 * GIB), **eplb, eplb_config={"num_redundant_experts": 6}))
    assert "a part of 6 copies of experts in each layer: fewer num_redundant_experts take less" in lines[1]
    assert "copies" not in "".join(refusal(case(Room(8 * GIB, 8 * GIB), **eplb)))
