"""Microseconds of sums over GPUs of one host, in graphs: NCCL, one shot, two shots, with addition and norm.

    python -m benchmarks.collectives --ranks 2 --output-json collectives.json
    python -m benchmarks.collectives --ranks 2 --step          # and milliseconds a token of the 8B shape, both ways
    python -m benchmarks.collectives --ranks 2 --products      # products with their sums and norms instead
    python -m benchmarks.collectives --ranks 4 --kib 256 512 1024 2048 4096 --hidden 4096

Rows are bfloat16, 8,192 wide. A figure is of the slowest rank: a graph of 32 calls, the median of its replays. With
residual and norm there are two: of one launch, and `apart`, of the sum's and the norm's.
Products are o and down of Llama 3.1 8B and 70B: stored and then summed, or sent by themselves, to owners (two hops) or
to all. Several matrices take turns, as in a model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch

from quire.compute.dist.added import RankSum, reduced_then_added
from quire.compute.dist.comm import Comm, Reduction
from quire.compute.dist.nccl import NcclComm
from quire.compute.dist.peers import PeerComm
from quire.kernels import gemm
from quire.kernels.norm import rms_norm
from quire.planner.peers import LONGEST_BYTES

HIDDEN = 8192
KIB = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536]
MATRICES = [(4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672)]
"""[h, k] of all ranks."""
PRODUCT_ROWS = [72, 128, 256, 1024, 4096, 8192]
TURNS_BYTES = 200 << 20
N_CALLS, N_REPLAYS = 32, 15
MOST_BYTES = 64 << 20
STEP = [
    *("latency", "--model", "shape:llama-3.1-8b", "--max-model-len", "4096", "--batch-size", "1", "--input-len", "128"),
    *("--output-len", "256", "--num-iters", "3", "--num-iters-warmup", "1", "--no-view", "--max-num-seqs", "8"),
]


def microseconds(comm: Comm, launch: Callable[[], object]) -> float:
    """A call, on the slowest rank."""
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(N_CALLS):
            launch()
    taken = []
    for _ in range(N_REPLAYS):
        comm.all_reduce(torch.zeros(1, device="cuda"), Reduction.MAX)  # all begin together
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / N_CALLS)
    found = torch.tensor([statistics.median(taken)])
    return round(float(comm.all_reduce(found, Reduction.MAX)), 2)


def measure_products(rank: int, size: int, meeting_point: str) -> list[dict[str, float]]:
    """As `measure`."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    nccl = NcclComm(rank, size, meeting_point, device)
    comms = {"two_hops": PeerComm(nccl, device, to_all=0), "to_all": PeerComm(nccl, device, to_all=1 << 40)}
    for comm in comms.values():
        comm.join()
    stored, rows = RankSum(comms["two_hops"]), []
    for h, k in MATRICES:
        n_turns = TURNS_BYTES // (h * k // size * 2) + 1
        weights = itertools.cycle(torch.randn(n_turns, h, k // size, device=device).to(torch.bfloat16).unbind())
        norm = (torch.ones(h, device=device, dtype=torch.bfloat16), 1e-5)
        for m in PRODUCT_ROWS:
            y = torch.randn(m, k // size, device=device).to(torch.bfloat16)
            x = torch.zeros(m, h, device=device, dtype=torch.bfloat16)
            row: dict[str, float] = {"h": h, "k": k // size, "rows": m}
            row["product"] = microseconds(nccl, lambda y=y, w=weights: gemm.linear(y, next(w)))
            row["stored"] = microseconds(
                nccl, lambda y=y, w=weights, x=x, norm=norm: stored.add(gemm.linear(y, next(w)), x, norm)
            )
            for name, comm in comms.items():
                if name == "two_hops" or x.nbytes <= LONGEST_BYTES // size:
                    row[name] = microseconds(
                        nccl, lambda c=comm, y=y, w=weights, x=x, norm=norm: c.add_product(y, next(w), None, x, norm)
                    )
            rows.append(row)
            if rank == 0:
                print("  ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
    for comm in comms.values():
        comm.check()
        comm.close()
    return rows


def measure(rank: int, size: int, meeting_point: str, sizes: list[int], h: int) -> list[dict[str, float]]:
    """One rank's run; all have the same figures. sizes: KiB; h: elements of a row."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    nccl = NcclComm(rank, size, meeting_point, device)
    one = PeerComm(nccl, device, one_shot=MOST_BYTES, longest=MOST_BYTES)
    two = PeerComm(nccl, device, one_shot=0, longest=MOST_BYTES)
    ours = PeerComm(nccl, device)
    for comm in (one, two, ours):
        comm.join()
    adding = RankSum(ours)
    norm, rows = (torch.ones(h, dtype=torch.bfloat16, device=device), 1e-5), []

    def apart(z: torch.Tensor, x: torch.Tensor) -> None:
        adding.add(z, x)
        rms_norm(x, *norm)

    for kib in sizes:
        flat = torch.zeros(kib << 9, dtype=torch.bfloat16, device=device)
        row = {"kib": float(kib)}
        row["nccl"] = microseconds(nccl, lambda x=flat: nccl.all_reduce(x))
        row["one_shot"] = microseconds(nccl, lambda x=flat: one.all_reduce(x))
        row["two_shots"] = microseconds(nccl, lambda x=flat: two.all_reduce(x))
        row["ours"] = microseconds(nccl, lambda x=flat: ours.all_reduce(x))
        if kib << 10 >= 2 * h:
            z = flat.view(-1, h)
            x = torch.zeros_like(z)
            row["nccl_add"] = microseconds(nccl, lambda x=x, z=z: reduced_then_added(nccl, z, x, None))
            row["nccl_add_norm"] = microseconds(nccl, lambda x=x, z=z: reduced_then_added(nccl, z, x, norm))
            row["ours_add"] = microseconds(nccl, lambda x=x, z=z: adding.add(z, x))
            row["ours_add_norm"] = microseconds(nccl, lambda x=x, z=z: adding.add(z, x, norm))
            row["ours_apart"] = microseconds(nccl, lambda x=x, z=z: apart(z, x))
            for name, comm in (("one_shot", one), ("two_shots", two)):
                row[f"{name}_add_norm"] = microseconds(nccl, lambda c=comm, x=x, z=z: c.add_reduced(z, x, norm))
        rows.append(row)
        if rank == 0:
            print("  ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
    for comm in (one, two, ours):
        comm.check()
        comm.close()
    return rows


def main() -> None:
    """Starts a process a rank, waits for them, and reads rank 0's figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step", action="store_true", help="also ms a token of the 8B shape")
    parser.add_argument("--products", action="store_true", help="products with their sums")
    parser.add_argument("--kib", type=int, nargs="+", default=KIB, help="sizes of sums")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="elements of a row, which divide sizes")
    parser.add_argument("--output-json", default="")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting-point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        at = (args.rank, args.ranks, args.meeting_point)
        rows = measure_products(*at) if args.products else measure(*at, args.kib, args.hidden)
        if args.rank == 0 and args.output_json:
            document = {"device": torch.cuda.get_device_name(), "ranks": args.ranks, "microseconds": rows}
            pathlib.Path(args.output_json).write_text(json.dumps(document, indent=1))
        return
    command = [sys.executable, "-m", "benchmarks.collectives", "--ranks", str(args.ranks)]
    command += ["--output-json", args.output_json, *(["--products"] if args.products else [])]
    command += ["--hidden", str(args.hidden), "--kib", *map(str, args.kib)]
    with tempfile.TemporaryDirectory() as folder:
        meet = ["--meeting-point", str(pathlib.Path(folder, "meet"))]
        ranks = [subprocess.Popen([*command, *meet, "--rank", str(rank)]) for rank in range(args.ranks)]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    for way in ("1", "0") if args.step else ():
        print(f"8B shape, {args.ranks} ranks, QUIRE_PEER_MEMORY={way}", flush=True)
        step = [sys.executable, "-m", "quire", "bench", *STEP, "--tensor-parallel-size", str(args.ranks)]
        subprocess.run(step, env={**os.environ, "QUIRE_PEER_MEMORY": way}, check=True)


if __name__ == "__main__":
    main()
