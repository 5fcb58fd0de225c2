"""Run by `test_flash.py`: compiles the kernels for Hopper, without a GPU, and bounds their shared memory."""

from __future__ import annotations

import brief  # noqa: F401
import torch
import triton
from flash_case import Case
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels.attention.triton import hooks as triton_hooks
from quire.kernels.flash import triton as launches
from quire.kernels.flash import triton_kernels as kernels

POINTERS = {torch.float32: "*fp32", torch.bool: "*i1"}
SHARED_BYTES = 227 * 1024
"""What one program may take on an H100 or H200."""


def build(kernel: object, head_dim: int, variant: str = "causal", dtype: torch.dtype = torch.bfloat16) -> None:
    kind = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    built = Case(variant, 1, 1, 1, 2, 1, head_dim).build()
    hooks = triton_hooks.of(built)
    block_d = triton.next_power_of_2(head_dim)
    rows, keys, warps, stages = launches.blocking(kernel.__name__, block_d, dtype, bool(built.tensors))
    constants = {
        "GROUP": 2, "RAGGED": False, "CAUSAL": built.causal, "WINDOWED": built.window > 0, "D": head_dim,
        "LOGITS": hooks.functions["LOGITS"], "MASK": hooks.functions["MASK"], "SLOPE": launches.slope(built),
        "BLOCK_D": block_d, "BLOCK_M": rows, "BLOCK_N": keys,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), kind)
    types |= {"lse": "*fp32", "deltas": "*fp32", "q_indptr": "*i32", "kv_indptr": "*i32", "scale": "fp32"}
    types["parameters"] = tuple(POINTERS[x.dtype] if isinstance(x, torch.Tensor) else "fp32" for x in hooks.params)
    signature = {name: types.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name not in kernels.NUMBERS and name != "parameters"]
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in made.asm["ptx"] or dtype == torch.float32
    assert made.metadata.shared <= SHARED_BYTES, (kernel, head_dim, made.metadata.shared)


if __name__ == "__main__":
    build(kernels.forward, 128, "mask")
    build(kernels.backward_keys, 64, "alibi")
    print("fine")
