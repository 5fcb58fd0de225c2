"""Run by `test_kernel_state_triton.py`: the recurrent kernels compile for Hopper, in bounded shared memory."""

from __future__ import annotations

import pathlib
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from compiled import SHARED_BYTES

from quire.kernels.state.triton import conv, delta, launcher, ssm, tokens

I32 = {"lines", "fresh", "piece_ptr", "row_ptr", "span_of", "keep"}
NUMBERS = {"low": "fp32", "high": "fp32", "scale": "fp32", "C": "i32", "single": "i32"}


def build(
    kernel: object, warps: int, stages: int = 2, floats: tuple[str, ...] = ("state", "scales"), **constants: object
) -> None:
    names = [name for name in kernel.arg_names if name not in constants]

    def type_of(name: str) -> str:
        if name.endswith("_stride"):
            return "i32"
        return NUMBERS.get(name) or ("*i32" if name in I32 else "*fp32" if name in floats else "*bf16")

    signature = {name: type_of(name) for name in names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if signature[name].startswith("*") or name.endswith("_stride")]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    assert ".entry" in built.asm["ptx"]
    assert built.metadata.shared <= SHARED_BYTES, (kernel, built.metadata.shared)


MAMBA = {"H": 80, "P": 64, "S": 128, "PER_GROUP": 80, "BLOCK_S": 128}
WIDE = MAMBA | {"S": 256, "BLOCK_S": 256}
KEYS = {"H": 32, "D": 128, "PER_KEY": 2, "BLOCK_D": 128}
QWEN = KEYS | {"E": 128}
CASES = {
    "rows": lambda: build(conv.convolve_rows, 2, floats=(), bias=None, K=4, SILU=True, BLOCK=128),
    "pieces": lambda: build(conv.convolve_pieces, 8, floats=(), K=4, SILU=True, L=64, BLOCK=64),
    "keep": lambda: build(conv.keep_inputs, 2, floats=(), K=4, BLOCK=128),
    "ssm rows": lambda: build(ssm.scan_rows, 4, **MAMBA, BLOCK_P=32),
    "ssm wide": lambda: build(ssm.scan_pieces, 8, **WIDE, L=64, BLOCK_P=32, PRECISION="tf32"),
    "delta rows": lambda: build(delta.scan_rows, 4, **QWEN, BLOCK_E=32),
    "delta solve": lambda: build(
        delta.solve_pieces, launcher.SOLVE_WARPS[2], 1, **KEYS, L=64, BLOCK=16, PRECISION="tf32", EXACT="tf32"
    ),
    "ssm tokens": lambda: build(tokens.scan_ssm, 1, **MAMBA, BLOCK_P=8),
    "delta tokens": lambda: build(tokens.scan_delta, 1, **QWEN, BLOCK_E=8),
    "delta": lambda: build(
        delta.scan_pieces,
        launcher.SCAN_WARPS[2],
        **QWEN,
        L=64,
        BLOCK_E=launcher.SCAN_VALUES[2],
        PRECISION="tf32",
        STAGES=launcher.SCAN_STAGES,
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
    print("fine")
