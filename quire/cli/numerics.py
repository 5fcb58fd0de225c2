"""`quire doctor numerics [MODEL]`: how far this machine's attention and a model lie from float64; a table, a verdict.

Owns the command's words: options in, table, JSON and plot out. Does not own what is measured (`bench/numerics`).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import TYPE_CHECKING, Final

import msgspec

from quire.bench import machine
from quire.bench.options import NumericsOptions
from quire.bench.plot import check_plot_path
from quire.bench.report import build_report, check_report_path, write_report
from quire.cli.interrupt import instant_exit
from quire.config.arch import ModelArch
from quire.config.flags import add_flags, read_flags
from quire.config.model import read_arch
from quire.core.errors import ConfigError, shown
from quire.core.files import read_regular
from quire.core.ticker import ticking

if TYPE_CHECKING:
    import torch

    from quire.bench.numerics.deviation import Row
    from quire.compute.models.decoder import Decoder

NAME: Final = "numerics"
MEANING: Final = (
    "Compare every attention kernel of this machine, and a whole model, with float64: differences by type, length and "
    "tile, agreement of the best token."
)
MAX_TEXT_BYTES: Final = 1 << 26


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire doctor numerics [MODEL] [options]"
    parser.add_argument(
        "model_argument", nargs="?", default="", metavar="MODEL",
        help="folder or .gguf file; without it the bundled demo model is used. Nothing is fetched",
    )  # fmt: skip
    add_flags(parser, NumericsOptions, title="options")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Measure and print; returns 0. ConfigError or LoadError for a wrong option, a missing model, too little memory."""
    options = read_flags(namespace, NumericsOptions)
    if options.plot:
        check_plot_path(options.plot)
    if options.json:
        check_report_path(options.json, "--json")
    with instant_exit():
        rows, skipped = _measure(options, namespace.model_argument)
    from quire.bench.numerics import plot, report

    print("\n".join(["", *report.verdict(rows)]))
    for what, reason in skipped.items():
        print(f"left out: {what}: {reason}")
    if options.json:
        settings = msgspec.structs.asdict(options) | {"model": namespace.model_argument or "demo"}
        write_report(options.json, build_report("numerics", settings, report.values(rows, skipped)))
    if options.plot:
        plot.write_numerics_plot(options.plot, rows, f"quire doctor numerics, {machine.cpu_model()}")
    return 0


def _measure(options: NumericsOptions, model: str) -> tuple[list[Row], dict[str, str]]:
    """All rows, each block printed when it is there, and what was left out."""
    import torch

    from quire.bench.kernels.session import device_type
    from quire.bench.numerics import report, session
    from quire.compute.weights.hub import find_checkpoint, is_on_hub

    if is_on_hub(model):
        raise ConfigError(f"{shown(model)} is neither a folder nor a file here; doctor fetches nothing")
    folder = find_checkpoint(model)
    arch = read_arch(folder)
    skipped: dict[str, str] = {}
    n = max((n for n in options.lengths if n <= arch.max_position_scaled), default=1)
    session.check_attention(arch)
    session.check_memory(arch, machine.memory_bytes()[1])
    device = torch.device(device_type(options.device))
    ids, load = _prompt(options, folder, arch, n), functools.partial(_load, folder, arch, n)
    rows: list[Row] = []
    blocks = session.measure(options, arch, load, ids, device, skipped)
    while True:
        with ticking("comparing with float64"):
            block = next(blocks, None)
        if block is None:
            return rows, skipped
        rows += block
        print("\n".join(report.lines(block)))
        sys.stdout.flush()


def _prompt(options: NumericsOptions, folder: pathlib.Path, arch: ModelArch, n: int) -> torch.Tensor:
    """int64 [n]: the first tokens of --text, or random ones. ConfigError for a text that is too short or not there."""
    import torch

    if not options.text:
        return torch.randint(arch.vocab_size, (n,), generator=torch.Generator().manual_seed(options.seed))
    from quire.text.tokenizer import HfTokenizer

    try:
        text = read_regular(options.text, MAX_TEXT_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"--text {shown(options.text)} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {shown(options.text)} is not UTF-8: {error}") from None
    ids = HfTokenizer.load(folder, arch.vocab_size).encode(text)
    if len(ids) < n:
        raise ConfigError(
            f"--text {shown(options.text)} has {len(ids):,} tokens, --lengths asks for {n:,}: give a longer text, or "
            f"lengths up to {len(ids):,}"
        )
    return torch.tensor(ids[:n])


def _load(
    folder: pathlib.Path, arch: ModelArch, max_model_len: int, dtype: torch.dtype, device: torch.device, rounding: str
) -> Decoder:
    from quire.compute.weights.loader import load_model

    return load_model(
        folder, arch, dtype=dtype, device=device, max_model_len=max_model_len, quantization=rounding, progress=False
    )
