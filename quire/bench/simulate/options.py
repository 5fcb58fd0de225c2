"""Options of `quire simulate`; flags and help are generated from them."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Collection
from typing import Annotated, Any, Literal

from msgspec import Meta

from quire.bench.datasets import read_lengths, uniform_lengths
from quire.bench.options import DatasetOptions
from quire.bench.simulate import requests as made
from quire.bench.simulate.requests import SimRequest
from quire.bench.simulate.trace import LONGEST_S, read_trace
from quire.config.command_line import dashed
from quire.core.errors import ConfigError
from quire.core.units import parse_bytes
from quire.planner.accelerators import Accelerator, accelerator_named, check_calibrated
from quire.planner.calibration import Calibration, load_calibration

CPU_BYTES = 16 << 30
"""What a small server has."""
INSTEAD = "; `cpu` is a CPU, with --calibration one that `quire bench calibrate` has timed"
"""Of the name of an accelerator."""


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


ABOUT_REQUESTS = (
    "dataset_name", "dataset_path", "num_prompts", "input_len", "output_len", "random_range_ratio", "prefix_len",
    "num_prefixes",
)  # fmt: skip
"""Options that make requests, which all variants of a comparison share."""
DRAWN = {"num_prompts", "input_len", "output_len", "random_range_ratio", "prefix_len"}
OF_DATASETS: dict[str, set[str]] = {
    "random": DRAWN, "prefix_repetition": DRAWN | {"num_prefixes"},
    "lengths": {"dataset_path", "num_prompts", "prefix_len"},
}  # fmt: skip
"""Name of a data set → which of them it reads."""


class SimulateOptions(DatasetOptions, kw_only=True):
    """Options of `quire simulate [MODEL]`."""

    trace: Annotated[str, _doc("File of requests, JSON lines or CSV, see docs/simulate.md.")] = ""
    workload: Annotated[
        Literal["none", "sharegpt", "W1", "W2", "W3", "W5"],
        _doc("sharegpt: lengths as of chats, drawn anew; W1 to W5: those of `quire bench throughput`, all at once."),
    ] = "none"
    request_rate: Annotated[
        list[Annotated[float, Meta(gt=0)]],
        _doc(
            "Requests a second, at random gaps; several make a curve; inf: all at once. A trace is stretched to it.",
            extra={"may_be_inf": True},
        ),
    ] = []
    burstiness: Annotated[float, _doc("Shape of the gaps: 1 is Poisson, less is burstier.", ge=1e-6, le=1e6)] = 1.0
    gpu: Annotated[str, _doc("The machine: a name that `quire plan --gpu` knows, or cpu.")] = "h200"
    calibration: Annotated[
        str, _doc("File of `quire bench calibrate` with times of that machine, in place of what comes with Quire.")
    ] = ""
    gpu_memory: Annotated[
        str, _doc("Its memory, for instance 80GiB; default: what is known of it, 16GiB beside a CPU.")
    ] = ""
    expert_loads: Annotated[
        str, _doc("How often experts are chosen: even, zipf:1.0, or a JSON file with a load of each (default: even).")
    ] = ""
    replicas: Annotated[int, _doc("Engines behind the router, each on a machine of its own.", ge=1, le=10_000)] = 1
    router: Annotated[
        Literal["prefix", "least-loaded", "round-robin", "random"],
        _doc("prefix: the rule of `quire serve --replicas`: who knows half of the prompt, else who has fewest."),
    ] = "prefix"
    slo: Annotated[str, _doc("Limits for goodput, for instance ttft=200ms,tpot=20ms,e2e=5s.")] = ""
    capacity: Annotated[bool, _doc("Look for the highest rate at which enough requests keep the --slo.")] = False
    slo_share: Annotated[float, _doc("How many are enough, of all.", gt=0, le=1)] = 0.99
    compare: Annotated[
        list[str],
        _doc("Other values of flags to simulate beside those given, for instance max-num-batched-tokens=2048;"
             " several at once with commas."),
    ] = []  # fmt: skip
    baselines: Annotated[
        bool, _doc("Schedulers of the past on the same requests, beside the engine; --plot is a folder then.")
    ] = False
    baseline_batch: Annotated[
        int, _doc("Requests of a static batch; a dynamic one leaves with that many, a half or a quarter.", ge=4)
    ] = 32
    baseline_delay_ms: Annotated[
        float, _doc("The longest that a request waits for others in dynamic batching.", ge=0)
    ] = 50.0

    @property
    def times(self) -> Calibration | None:
        """Of `calibration`; None: none was given. ConfigError for times of another machine."""
        if not self.calibration:
            return None
        found, device = load_calibration(pathlib.Path(self.calibration)), self._accelerator
        if (found.device == "cpu") != (device is None):
            where, name = ("a CPU", "--gpu cpu") if device else (f"the {found.device}", "that GPU there")
            raise ConfigError(f"--calibration was measured on {where}, and --gpu is {self.gpu}: name {name}")
        if device is not None:
            check_calibrated(found, device)
        return found

    @property
    def _accelerator(self) -> Accelerator | None:
        """None: a CPU. ConfigError for an unknown one."""
        return None if self.gpu == "cpu" else accelerator_named(self.gpu, INSTEAD)

    @property
    def memory_bytes(self) -> int:
        """Of one machine. ConfigError for an unknown one."""
        if self.gpu_memory:
            return parse_bytes(self.gpu_memory, "gpu_memory")
        device = self._accelerator
        return CPU_BYTES if device is None else int(device.memory_bytes)

    @property
    def memory_is_assumed(self) -> bool:
        """Nothing is known of the memory beside a CPU, and this machine need not be the one."""
        return not self.gpu_memory and self._accelerator is None

    def check_read(self, given: Collection[str]) -> None:
        """ConfigError for one of the `given` options that the source of the requests does not read."""
        if self.trace:
            source, read = "--trace", {"trace"}
        elif self.workload != "none":
            source = f"--workload {self.workload}"
            read = {"num_prompts", "prefix_len", "num_prefixes"} if self.workload == "sharegpt" else {"dataset_path"}
        else:
            source = f"--dataset-name {self.dataset_name}"
            read = {"dataset_name"} | OF_DATASETS[self.dataset_name]
        for name in ABOUT_REQUESTS:
            if name in given and name not in read:
                raise ConfigError(f"{source} says what is asked, and does not read {dashed(name)}: leave it out")

    def requests(self, seed: int) -> tuple[list[SimRequest], list[str]]:
        """(requests, notes for people), at their own times if they have some, else all at once."""
        if self.trace and self.workload != "none":
            raise ConfigError("--trace and --workload both say what is asked: give one of them")
        if self.trace:
            return read_trace(self.trace)
        if self.workload == "sharegpt":
            if self.num_prompts == 0:
                raise ConfigError(
                    "--num-prompts 0 takes all of a lengths file, and --workload sharegpt has none: give 1 or more, or"
                    " --dataset-name lengths in place of --workload"
                )
            lengths = made.sharegpt_lengths(self.num_prompts, seed)
            return made.of_lengths(lengths, self.prefix_len, self.num_prefixes), []
        if self.workload != "none":
            return made.workload_requests(self.workload, self.dataset_path), []
        if self.dataset_name == "lengths":
            if not self.dataset_path:
                raise ConfigError("--dataset-name lengths needs --dataset-path: a JSON file with 'input' and 'output'")
            return made.of_lengths(read_lengths(self.dataset_path, self.num_prompts), self.prefix_len), []
        if self.num_prompts == 0:
            raise ConfigError("--num-prompts 0 takes all of a lengths file: use --dataset-name lengths too")
        lengths = uniform_lengths(self.num_prompts, self.input_len, self.output_len, self.random_range_ratio, seed)
        if self.dataset_name == "random":
            return made.of_lengths(lengths, self.prefix_len), []
        return made.of_lengths(lengths, self.prefix_len or 256, self.num_prefixes), []

    def timed(self, requests: list[SimRequest], rate: float | None, seed: int) -> list[SimRequest]:
        """The requests at one of the rates; None: as they are. ConfigError for a rate at which they never end."""
        if rate is None:
            return requests
        if not math.isinf(made.rate_of(requests)):
            timed = made.stretched(requests, rate)
        else:
            timed = made.at_rate(requests, rate, self.burstiness, seed)
        if timed and not timed[-1].arrival_s < LONGEST_S:
            raise ConfigError(
                f"--request-rate {rate:g}: the last of {len(timed):,} requests would come after"
                f" {timed[-1].arrival_s:.3g} s, more than a year: raise it"
            )
        return timed


def is_known_at_once(requests: list[SimRequest], rates: list[float]) -> bool:
    """Whether all requests come at once, as to an engine in a script, and not to a server."""
    return all(map(math.isinf, rates or [made.rate_of(requests)]))
