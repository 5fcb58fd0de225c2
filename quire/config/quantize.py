"""Options of `quire quantize`, and how a checkpoint's config.json says what it wrote (compressed-tensors). Torch-free.

Owns the names of number formats that a checkpoint is written in. Does not own the numbers (`compute/quantize`).
The layout is that of https://github.com/vllm-project/compressed-tensors, which vLLM and transformers read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta


class Format(msgspec.Struct, frozen=True):
    """Numbers that a matrix is rounded to: weight = code * scale, symmetric."""

    n_bits: int
    group: int
    """Values along a row that share a scale; 0: all of a row."""
    layout: str
    """Name of compressed-tensors for how codes are stored."""
    is_float: bool = False
    """Codes are float8 e4m3; else integers."""

    @property
    def is_sparse(self) -> bool:
        """Values are as they were, or zero: two of each group."""
        return self.n_bits == 16

    @property
    def rounds_activations(self) -> bool:
        """Whether products are meant to round their input to the same type, with a scale a token."""
        return self.n_bits == 8


FORMATS: Final = {
    "int4": Format(4, 64, "pack-quantized"),
    "int4-g32": Format(4, 32, "pack-quantized"),
    "int4-g128": Format(4, 128, "pack-quantized"),
    "int8": Format(8, 0, "int-quantized"),
    "fp8": Format(8, 0, "float-quantized", is_float=True),
    "2:4": Format(16, 4, "dense"),
}
"""Value of --scheme → format."""


PRUNING: Final = ("magnitude", "wanda")
"""Values of --method that a sparse format has, and no other."""


def quantization_config(form: Format, ignored: Sequence[str], act_order: bool) -> dict[str, Any]:
    """The value of `quantization_config`. ignored: names of linear layers that are left as they are."""
    kind = "float" if form.is_float else "int"
    weights = {
        "num_bits": form.n_bits, "type": kind, "symmetric": True, "strategy": "group" if form.group else "channel",
        "group_size": form.group or None, "dynamic": False, "actorder": "static" if act_order else None,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs if form.rounds_activations else None,
        "output_activations": None, "format": form.layout,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form.layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": list(ignored), "kv_cache_scheme": None,
    }  # fmt: skip


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


class QuantizeOptions(msgspec.Struct, kw_only=True):
    """Options of `quire quantize`."""

    scheme: Annotated[
        Literal["int4", "int4-g32", "int4-g128", "int8", "fp8", "2:4"],
        _doc(
            "Numbers of the matrices of layers: int4: 4 bits, a scale for each 64 values of a row; int8 and fp8 (e4m3):"
            " a scale a row, and engines round activations to 8 bits too; 2:4: two of four neighbours become zero, and"
            " are stored all the same."
        ),
    ] = "int4"
    method: Annotated[
        Literal["gptq", "awq", "rtn", "magnitude", "wanda"],
        _doc("gptq: what is rounded first is made up for by what is rounded later; awq: inputs with large values get"
             " finer steps; rtn: to the nearest, without a look at inputs. Of 2:4: magnitude: the smaller values go;"
             " wanda: the smaller products of value and input."),
    ] = "gptq"  # fmt: skip
    calibrate: Annotated[str, _doc("Text file (UTF-8) like what the model will read; needed.")] = ""
    evaluate: Annotated[
        str,
        _doc("Text file on which quality is measured; empty: the last tenth of --calibrate, which is left out of it."),
    ] = ""
    samples: Annotated[int, _doc("Most pieces of the text that layers are calibrated with.", ge=1, le=1 << 16)] = 128
    sample_tokens: Annotated[int, _doc("Tokens of a piece; at most the model's context.", ge=8, le=1 << 20)] = 512
    act_order: Annotated[
        bool, _doc("gptq: inputs with large values are rounded first. The layout in the file stays the same.")
    ] = False
    damping: Annotated[float, _doc("gptq: share of the mean that is added to the Hessian's diagonal.", gt=0, le=1)] = (
        0.01
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("Where layers run.")] = "auto"
    json: Annotated[str, _doc("File for the figures with commit, hardware, command and configuration.")] = ""
