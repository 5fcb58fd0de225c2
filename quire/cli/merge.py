"""`quire merge MODEL ADAPTER OUTDIR`: a checkpoint that an adapter is merged into.

Owns the command's words. Does not own what is done (`compute/adapters/merge`).
"""

from __future__ import annotations

import argparse
import pathlib
import time

from quire.cli.interrupt import instant_exit, terminated_tidily
from quire.config.advice import check_adapter_folder
from quire.config.flags import named
from quire.config.model import read_arch
from quire.config.shapes import check_has_weights
from quire.core.units import format_bytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "quire merge MODEL ADAPTER OUTDIR"
    parser.add_argument("model_argument", metavar="MODEL", help="folder or hub name that the adapter was trained for")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder in PEFT's layout")
    parser.add_argument("outdir", type=named, metavar="OUTDIR", help="folder to make; it must be new or empty")


def run(namespace: argparse.Namespace) -> int:
    """Merge and print; returns 0."""
    check_has_weights(namespace.model_argument, "merge into")
    target = pathlib.Path(namespace.outdir).expanduser()
    with instant_exit():
        from quire.compute.adapters.merge import Merge
        from quire.compute.quantize.folder import Folder, check_target
        from quire.compute.weights.hub import find_checkpoint

        check_adapter_folder(namespace.adapter, "ADAPTER")
        check_target(target)
        source = find_checkpoint(namespace.model_argument)
        merge = Merge(source, read_arch(source), str(pathlib.Path(namespace.adapter).expanduser()))
    kind = "DoRA" if merge.config.is_dora else "rsLoRA" if merge.config.rank_stabilised else "LoRA"
    what = f"{namespace.adapter} ({kind}, rank {merge.config.rank})"
    print(f"{what} into {source}: {merge.n_matrices} matrices", flush=True)
    if merge.config.base:
        print(f"it was trained for {merge.config.base}")
    start_s = time.monotonic()
    with terminated_tidily(), Folder(target, len(merge.shards), merge.n_bytes) as folder:
        for tensors in merge:
            folder.add(tensors)
        n_bytes = folder.finish(source, None)
    print(f"written in {time.monotonic() - start_s:.0f} s: {target}, {format_bytes(n_bytes)}")
    return 0
