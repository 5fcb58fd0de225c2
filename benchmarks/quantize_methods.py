"""Bits per byte of the demo model for each scheme and method of `quire quantize`, and errors of its products.

    python -m benchmarks.held_out_texts FOLDER
    python -m benchmarks.quantize_methods FOLDER

Weights alone are rounded. What engines make of the folders, and how fast they are, measures `quire bench tradeoffs`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import tempfile

from benchmarks.held_out_texts import KINDS
from quire.bench.report import build_report, write_report
from quire.cli.quantize import make
from quire.config.quantize import FORMATS, PRUNING, QuantizeOptions

ROUNDING = ("rtn", "awq", "gptq")
ORDERED = {"int4": ("gptq, act-order",)}
RESULT = pathlib.Path(__file__).with_name("results") / "quantize_methods.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sample-tokens", type=int, default=512)
    parser.add_argument("--output", default=str(RESULT))
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        held_out = place / "held_out.txt"
        held_out.write_text("".join((args.folder / f"{kind}.txt").read_text() for kind in KINDS))
        for scheme, form in FORMATS.items():
            for method in PRUNING if form.is_sparse else (*ROUNDING, *ORDERED.get(scheme, ())):
                options = QuantizeOptions(
                    scheme=scheme, method=method.partition(",")[0], act_order="act" in method, device="cpu",
                    calibrate=str(args.folder / "calibration.txt"), evaluate=str(held_out), samples=args.samples,
                    sample_tokens=args.sample_tokens,
                )  # type: ignore[arg-type]  # fmt: skip
                with contextlib.redirect_stdout(io.StringIO()):
                    figures = make(options, "demo", place / f"{len(results)}")
                errors = [pair for layer in figures.pop("output_errors").values() for pair in layer.values()]
                ours, plain = (sum(column) / len(errors) for column in zip(*errors, strict=True))
                results[f"{scheme} {method}"] = figures | {"output_error": ours, "output_error_plain": plain}
                before, after = figures["bits_per_byte"].values()
                change = f"{before:.4f} to {after:.4f} ({after / before - 1:+.2%})"
                print(f"{scheme} {method}: {change}, error of outputs {ours:.2%}, plain {plain:.2%}", flush=True)
    settings = {"samples": args.samples, "sample_tokens": args.sample_tokens}
    write_report(args.output, build_report("quantize_methods", settings, results))


if __name__ == "__main__":
    main()
