"""`quire quantize MODEL OUTDIR`: a checkpoint with rounded matrices, calibrated with a text; quality before and after.

Owns the command's words and its text. Does not own what is done (`compute/quantize`).
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quire.bench.report import build_report, check_report_path, write_report
from quire.cli.interrupt import instant_exit, terminated_tidily
from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.flags import add_flags, named, read_flags
from quire.config.model import read_arch
from quire.config.quantize import FORMATS, PRUNING, QuantizeOptions, quantization_config
from quire.config.shapes import check_has_weights
from quire.core import env
from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.core.units import format_bytes

if TYPE_CHECKING:
    from quire.compute.quantize.session import LayerReport, Session, Streams
    from quire.compute.quantize.source import Source
    from quire.text.tokenizer import HfTokenizer

MAX_TEXT_BYTES: Final = 1 << 28
HELD_OUT: Final = 10
"""One part in so many of the text is kept for measuring quality, where there is no other."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire quantize MODEL OUTDIR --calibrate FILE [options]"
    parser.add_argument("model_argument", metavar="MODEL", help="folder or hub name; `demo` is the bundled demo model")
    parser.add_argument("outdir", type=named, metavar="OUTDIR", help="folder to make; it must be new or empty")
    add_flags(parser, QuantizeOptions, title="options")


def run(namespace: argparse.Namespace) -> int:
    """Quantise and print; returns 0."""
    options = read_flags(namespace, QuantizeOptions)
    if options.json:
        check_report_path(options.json, "--json")
    # Columns are rounded by thousands of short loops. A thread that spins at the end of each, for one whose core others
    # have, made that up to 15 times as slow. OpenMP reads this when torch is loaded.
    env.set_for_children("OMP_WAIT_POLICY", "PASSIVE")
    figures = make(options, namespace.model_argument, pathlib.Path(namespace.outdir).expanduser())
    if options.json:
        settings = msgspec.structs.asdict(options) | {"model": namespace.model_argument}
        write_report(options.json, build_report("quantize", settings, figures))
    return 0


def make(options: QuantizeOptions, model: str, target: pathlib.Path) -> dict[str, Any]:
    """Write the folder, with a line for each layer; returns figures. ConfigError or LoadError before anything is
    computed, where it can be known."""
    _check(options)
    check_has_weights(model, "quantise")
    with instant_exit():
        from quire.compute.quantize.folder import check_target
        from quire.compute.weights.hub import find_checkpoint

        check_target(target)
        folder = find_checkpoint(model)
        session, source, scored_bytes = _session(options, folder, read_arch(folder))
    return _write(options, session, source, target, scored_bytes)


def _check(options: QuantizeOptions) -> None:
    if not options.calibrate:
        raise ConfigError("--calibrate FILE is needed: a text like what the model will read, from some 100 KB on")
    if options.act_order and options.method != "gptq":
        raise ConfigError(f"--act-order belongs to --method gptq, not {options.method}")
    if FORMATS[options.scheme].is_sparse != (options.method in PRUNING):
        own = "magnitude or wanda" if FORMATS[options.scheme].is_sparse else "gptq, awq or rtn"
        raise ConfigError(f"--scheme {options.scheme} takes --method {own}, not {options.method}")


def _session(options: QuantizeOptions, folder: pathlib.Path, arch: ModelArch) -> tuple[Session, Source, int]:
    """What will run, and the bytes of text that are scored."""
    import torch

    from quire.compute.platform import platform_of
    from quire.compute.quantize.session import Recipe, Session
    from quire.compute.quantize.source import Source

    device = platform_of(EngineConfig(device=options.device)).device
    dtype = torch.float32 if device.is_host else getattr(torch, arch.dtype)
    source = Source(folder, arch, dtype, device.torch_device)
    streams, n_bytes = _streams(options, folder, arch, device.torch_device)
    recipe = Recipe(FORMATS[options.scheme], options.method, options.act_order, options.damping)
    with torch.inference_mode():
        return Session(source, device, recipe, streams), source, n_bytes


def _streams(options: QuantizeOptions, folder: pathlib.Path, arch: ModelArch, device: Any) -> tuple[Streams, int]:
    from quire.compute.quantize.session import Streams

    ids, held_out, tokenizer = read_tokens(options, folder, arch)
    calibration, scored = (_pieces(one, options.samples, options.sample_tokens) for one in (ids, held_out))
    n_bytes = sum(len(tokenizer.decode(piece[1:]).encode()) for piece in scored.tolist())
    return Streams(calibration.to(device), scored.to(device)), n_bytes


def read_tokens(
    options: QuantizeOptions, folder: pathlib.Path, arch: ModelArch
) -> tuple[list[int], list[int], HfTokenizer]:
    """(tokens that calibrate, tokens on which quality is measured, what made them). ConfigError for texts that cannot
    be read, or have too few."""
    from quire.text.tokenizer import HfTokenizer

    if options.sample_tokens > arch.max_position_scaled:
        raise ConfigError(
            f"--sample-tokens {options.sample_tokens:,} is more than the model's context, {arch.max_position_scaled:,}"
        )
    tokenizer = HfTokenizer.load(folder, arch.vocab_size)
    ids = _tokens(options.calibrate, "--calibrate", tokenizer, options.sample_tokens * (1 if options.evaluate else 2))
    if options.evaluate:
        held_out = _tokens(options.evaluate, "--evaluate", tokenizer, options.sample_tokens)
    else:
        first = len(ids) - max(options.sample_tokens, len(ids) // HELD_OUT)
        ids, held_out = ids[:first], ids[first:]
    return ids, held_out, tokenizer


def _tokens(path: str, flag: str, tokenizer: HfTokenizer, least: int) -> list[int]:
    try:
        text = read_regular(path, MAX_TEXT_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{flag} {shown(path)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {shown(path)} is not UTF-8: {error}") from None
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < least:
        raise ConfigError(
            f"{flag} {shown(path)} has {len(ids):,} tokens, and at least {least:,} are needed: give a longer text, or"
            " smaller --sample-tokens"
        )
    return ids


def _pieces(ids: list[int], most: int, length: int) -> Any:
    """int64 [n, length]: pieces at even distances, none of which share a token."""
    import torch

    n_whole = len(ids) // length
    n = min(most, n_whole)
    starts = [i * n_whole // n * length for i in range(n)]
    return torch.tensor([ids[start : start + length] for start in starts])


def _write(
    options: QuantizeOptions, session: Session, source: Source, target: pathlib.Path, scored_bytes: int
) -> dict[str, Any]:
    """Layer after layer, a line each; returns the figures of the report."""
    import torch

    from quire.compute.quantize.folder import Folder
    from quire.compute.quantize.stored import n_bytes_of

    form, arch = FORMATS[options.scheme], source.arch
    ignored = source.ignored(form.group)
    print(f"{source.folder} → {target}: {options.scheme} by {options.method}, {arch.n_layers} layers")
    print("error of each product's outputs on the calibration text (in brackets: without a look at inputs)")
    start_s, errors = time.monotonic(), {}
    needed = n_bytes_of(source, form, session.scale_dtype.itemsize)
    with terminated_tidily(), torch.inference_mode(), Folder(target, arch.n_layers + 1, needed) as folder:
        for report in session.layers():
            folder.add(report.tensors)
            errors[str(report.number)] = dict(report.errors)
            print(_line(report), flush=True)
        folder.add(session.rest())
        before, after = session.quality()
        said = None if form.is_sparse else quantization_config(form, ignored, options.act_order)
        n_bytes = folder.finish(source.folder, said)
    seconds = time.monotonic() - start_s
    found = {"bits_per_byte": {"before": before / scored_bytes, "after": after / scored_bytes}, "bytes": n_bytes}
    if ignored:
        print(f"left as they are: {', '.join(ignored[:3])}{f' and {len(ignored) - 3} more' * (len(ignored) > 3)}")
    print(
        f"bits per byte of {scored_bytes:,} held-out bytes: {before / scored_bytes:.4f} → {after / scored_bytes:.4f}"
        f" ({after / before - 1:+.2%}); weights only: activations are not rounded here"
    )
    print(f"written in {seconds:.0f} s: {target}, {format_bytes(n_bytes)}")
    return found | {"seconds": seconds, "output_errors": errors}


def _line(report: LayerReport) -> str:
    found = {}
    for name, (ours, plain) in report.errors.items():
        place = name.split(".", 3)[-1]
        if ".experts." not in name:
            found[place] = f"{place} {ours:.2%} ({plain:.2%})"
    experts = [pair for name, pair in report.errors.items() if ".experts." in name]
    if experts:
        ours, plain = (sum(column) / len(experts) for column in zip(*experts, strict=True))
        found["experts"] = f"{len(experts)} of experts {ours:.2%} ({plain:.2%})"
    return f"layer {report.number}: {', '.join(found.values())}"
