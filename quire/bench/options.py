"""Options of `quire bench`, in vLLM's spelling; flags and help are generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.bench.datasets import TOKEN_LIMIT, Dataset, from_lengths, read_lengths, uniform_lengths
from quire.bench.summary import PERCENTILES
from quire.config.engine import MOST_SEQS
from quire.core.errors import ConfigError
from quire.core.sampling import Temperature
from quire.planner.workload import MOST_TOKENS

MOST_COMPARED = 16_384
"""Tokens of a sequence beyond which its attention in float64 takes hours on a CPU."""


def _doc(text: str, **bounds: Any) -> Meta:
    return Meta(description=text, **bounds)


BatchSize = Annotated[int, Meta(ge=1, le=MOST_SEQS)]
ViewSwitch = Annotated[
    bool,
    _doc("Probe the device and profile a few steps: the share of the limit attained, and where a step's time goes."),
]
TracePath = Annotated[
    str, _doc("File for the profiled steps as a Chrome trace (ui.perfetto.dev): a row for host and device each.")
]


class ReportOptions(msgspec.Struct, kw_only=True):
    """Where the figures go besides the terminal."""

    output_json: Annotated[str, _doc("File for the figures with commit, hardware, command and configuration.")] = ""
    plot: Annotated[str, _doc("Picture of the batch filling over time: a .png (needs matplotlib) or an .html.")] = ""


class DatasetOptions(ReportOptions, kw_only=True):
    """What is asked. Prompts are random token ids, fresh in each repetition."""

    dataset_name: Annotated[
        Literal["random", "lengths", "prefix_repetition"],
        _doc("random: lengths around --input-len and --output-len; lengths: from --dataset-path (ShareGPT-like); "
             "prefix_repetition: --num-prefixes prefixes of --prefix-len tokens, --input-len own tokens each."),
    ] = "random"  # fmt: skip
    dataset_path: Annotated[str, _doc("JSON file with lists 'input' and 'output' of lengths in tokens.")] = ""
    num_prompts: Annotated[int, _doc("Number of requests; 0 takes all of a lengths file.", ge=0, le=10_000_000)] = 1000
    input_len: Annotated[
        int, _doc("Prompt tokens of each request, after a shared prefix.", ge=1, le=MOST_TOKENS)
    ] = 1024
    output_len: Annotated[int, _doc("Tokens to generate for each request.", ge=1, le=MOST_TOKENS)] = 128
    random_range_ratio: Annotated[float, _doc("Lengths are uniform in [len*(1-r), len*(1+r)].", ge=0, lt=1)] = 0.0
    prefix_len: Annotated[int, _doc("Tokens of a prefix that requests share.", ge=0, le=MOST_TOKENS)] = 0
    num_prefixes: Annotated[int, _doc("Distinct prefixes of prefix_repetition.", ge=1)] = 10

    def dataset(self, vocab_size: int, seed: int) -> Dataset:
        """The requests that these options describe, with token ids below `vocab_size`. ConfigError if they clash."""
        if self.dataset_name == "lengths":
            if not self.dataset_path:
                raise ConfigError("--dataset-name lengths needs --dataset-path: a JSON file with 'input' and 'output'")
            return from_lengths(read_lengths(self.dataset_path, self.num_prompts), vocab_size, seed, self.prefix_len)
        if self.num_prompts == 0:
            raise ConfigError("--num-prompts 0 takes all of a lengths file: use --dataset-name lengths too")
        lengths = uniform_lengths(self.num_prompts, self.input_len, self.output_len, self.random_range_ratio, seed)
        if self.dataset_name == "random":
            return from_lengths(lengths, vocab_size, seed, self.prefix_len)
        return from_lengths(lengths, vocab_size, seed, self.prefix_len or 256, self.num_prefixes)


class ThroughputOptions(DatasetOptions, kw_only=True):
    """Options of `quire bench throughput`."""

    workload: Annotated[
        Literal["none", "W1", "W2", "W3", "W5"],
        _doc("A fixed workload in place of the dataset options; see docs/bench.md."),
    ] = "none"
    temperature: Annotated[Temperature, _doc("Sampling temperature.")] = 1.0
    num_repeats: Annotated[int, _doc("Timed repetitions; the median is reported.", ge=1)] = 1
    num_warmups: Annotated[int, _doc("Untimed passes over all prompts with short outputs.", ge=0)] = 1
    warmup_output_len: Annotated[int, _doc("Output tokens of each request in a warm-up pass.", ge=1)] = 16
    view: ViewSwitch = True
    profile: TracePath = ""
    vocab_size: Annotated[int, _doc("Random ids are below this and below the model's vocabulary.", ge=1)] = TOKEN_LIMIT


class LatencyOptions(ReportOptions, kw_only=True):
    """Options of `quire bench latency`."""

    workload: Annotated[
        Literal["none", "W4", "W6"], _doc("Fixed cases in place of the three options below; see docs/bench.md.")
    ] = "none"
    batch_size: Annotated[int, _doc("Requests that start together.", ge=1, le=MOST_SEQS)] = 8
    input_len: Annotated[int, _doc("Prompt tokens.", ge=1)] = 32
    output_len: Annotated[int, _doc("Tokens to generate.", ge=1)] = 128
    num_iters_warmup: Annotated[int, _doc("Untimed iterations.", ge=0)] = 3
    num_iters: Annotated[int, _doc("Timed iterations.", ge=1)] = 10
    view: ViewSwitch = True
    profile: TracePath = ""
    vocab_size: Annotated[int, _doc("Random ids are below this and below the model's vocabulary.", ge=1)] = TOKEN_LIMIT


class SpeculateOptions(ReportOptions, kw_only=True):
    """Options of `quire bench speculate`."""

    plot: Annotated[
        str, _doc("Picture of a step's tokens and of the speed-up over the number of drafts: a .png (needs matplotlib)"
                  " or an .html.")
    ] = ""  # fmt: skip

    batch_sizes: Annotated[
        list[BatchSize], _doc("Requests that start together; a row of the table each.")
    ] = msgspec.field(default_factory=lambda: [1, 4, 16])
    input_len: Annotated[int, _doc("Prompt tokens.", ge=8)] = 256
    output_len: Annotated[int, _doc("Tokens to generate.", ge=2)] = 128
    text: Annotated[
        str, _doc("File of which prompts are pieces, taken at random; empty: prompts are random token ids.")
    ] = ""
    temperature: Annotated[Temperature, _doc("Sampling temperature.")] = 0.0
    acceptance: Annotated[
        float,
        _doc(
            "Chance with which each draft is right, whatever the drafter says, which takes its time all the same: for"
            " random weights. Less than 0: as the drafter says.",
            le=1,
        ),
    ] = -1.0
    num_iters_warmup: Annotated[int, _doc("Untimed iterations.", ge=0)] = 1
    num_iters: Annotated[int, _doc("Timed iterations of each engine, in turns; medians are compared.", ge=1)] = 5
    vocab_size: Annotated[int, _doc("Random ids are below this and below the model's vocabulary.", ge=1)] = TOKEN_LIMIT


class ServeBenchOptions(DatasetOptions, kw_only=True):
    """Options of `quire bench serve`, which needs no model here: it talks to a server."""

    base_url: Annotated[str, _doc("Address of an OpenAI-compatible server.")] = "http://127.0.0.1:8000"
    endpoint: Annotated[str, _doc("Path of its completions.")] = "/v1/completions"
    model: Annotated[str, _doc("Model name in the requests; default: the first that /v1/models lists.")] = ""
    api_key: Annotated[str, _doc("Bearer key; default: QUIRE_API_KEY.")] = ""
    request_rate: Annotated[float, _doc(
        "Requests a second, at random gaps; inf: all at once.", gt=0, extra={"may_be_inf": True},
    )] = float("inf")
    burstiness: Annotated[float, _doc("Shape of the gaps: 1 is Poisson, less is burstier.", ge=1e-6, le=1e6)] = 1.0
    max_concurrency: Annotated[int, _doc("Most requests in flight; 0 sets no limit.", ge=0)] = 0
    temperature: Annotated[Temperature, _doc("Sampling temperature.")] = 0.0
    ignore_eos: Annotated[
        bool, _doc("Ask for exactly --output-len tokens (not an OpenAI field; vLLM and Quire know it).")
    ] = True
    seed: Annotated[int, _doc("Seed of lengths, tokens and arrival times.", ge=0)] = 0
    num_warmups: Annotated[int, _doc("Untimed requests before the run.", ge=0)] = 1
    ready_check_timeout_sec: Annotated[float, _doc("Longest wait for the server to answer /v1/models.", ge=0)] = 60.0
    metric_percentiles: Annotated[
        list[Annotated[float, Meta(ge=0, le=100)]], _doc("Percentiles of TTFT, TPOT, ITL and E2EL to report.")
    ] = msgspec.field(default_factory=lambda: list(PERCENTILES))
    goodput: Annotated[
        list[str], _doc("Limits in ms, for instance ttft:200 tpot:50 e2el:5000; counts requests within all.")
    ] = []
    vocab_size: Annotated[
        int, _doc("Random ids are below this; the server's vocabulary must be at least as large.", ge=1)
    ] = 1000


class ReplayOptions(ReportOptions, kw_only=True):
    """Options of `quire bench replay FILE`."""

    base_url: Annotated[str, _doc("Address of an OpenAI-compatible server that takes token ids.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str, _doc("Model name in the requests; default: the first that /v1/models lists.")] = ""
    api_key: Annotated[str, _doc("Bearer key; default: QUIRE_API_KEY.")] = ""
    speed: Annotated[float, _doc("2 sends the requests in half the recorded time.", gt=0)] = 1.0
    max_requests: Annotated[int, _doc("Only the first of them; 0: all.", ge=0)] = 0
    temperature: Annotated[Temperature, _doc("Sampling temperature.")] = 0.0
    ready_check_timeout_sec: Annotated[float, _doc("Longest wait for the server to answer /v1/models.", ge=0)] = 60.0
    vocab_size: Annotated[
        int, _doc("Prompts recorded without content are made of ids below this; the server's must be as large.", ge=64)
    ] = 1000


class CalibrateOptions(msgspec.Struct, kw_only=True):
    """Options of `quire bench calibrate`."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], _doc("What to measure; auto: the GPU if there is one.")
    ] = "auto"  # fmt: skip
    rounds: Annotated[int, _doc("Times that every step is timed, in turns, after one that warms up.", ge=1)] = 4
    time_limit: Annotated[
        float,
        _doc(
            "Seconds after which no further turn begins; each model is loaded, and each step timed once after a turn"
            " that warms up, however long that takes: on two cores of a CPU 50 to 80 s and more. 0: no limit.",
            ge=0,
        ),
    ] = 110.0
    output: Annotated[str, _doc("File for the calibration, which `quire plan --calibration FILE` reads.")] = (
        "calibration.json"
    )


class KernelBenchOptions(msgspec.Struct, kw_only=True):
    """Options of `quire bench kernels`."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], _doc("Where to measure; auto: on the GPU if there is one.")
    ] = "auto"  # fmt: skip
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], _doc("Type of the inputs.")] = "bf16"
    ops: Annotated[str, _doc("Ops, separated by commas (`quire kernels list`); default: all.")] = ""
    cases: Annotated[
        str, _doc("Only cases whose op and name contain one of these texts, separated by commas; leaves out checks.")
    ] = ""
    quick: Annotated[bool, _doc("Fewer cases and shorter measurements.")] = False
    time_limit: Annotated[
        float, _doc("Seconds from the first case on, shared by the ops; each has one case at least; 0: no limit.", ge=0)
    ] = 140.0
    output: Annotated[str, _doc("File for the figures as JSON, with commit, hardware and command.")] = ""
    plot: Annotated[str, _doc("Picture of the shares of the limit: a .png (needs matplotlib).")] = ""


class NumericsOptions(msgspec.Struct, kw_only=True):
    """Options of `quire doctor numerics`."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], _doc("Whose kernels; auto: the GPU's if there is one. float64 is on the CPU.")
    ] = "auto"
    dtype: Annotated[
        list[Literal["bf16", "fp16", "fp32"]],
        _doc(
            "Types to compare with float64. Rounded weights are measured in the first.",
            extra={"words": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}},
        ),
    ] = msgspec.field(default_factory=lambda: ["bf16", "fp16", "fp32"])
    lengths: Annotated[
        list[Annotated[int, Meta(ge=1, le=MOST_COMPARED)]],
        _doc("Tokens of the sequences; those beyond a model's context are for random inputs alone."),
    ] = msgspec.field(default_factory=lambda: [16, 128, 512, 1024])
    text: Annotated[str, _doc("File whose text is the model's prompt, in UTF-8; default: random token ids.")] = ""
    seed: Annotated[int, _doc("Seed of random inputs and token ids.", ge=0)] = 0
    json: Annotated[str, _doc("File for every figure, with commit, hardware and command.")] = ""
    plot: Annotated[str, _doc("Picture of the mean differences: a .png (needs matplotlib) or an .html.")] = ""


class TradeoffOptions(ReportOptions, kw_only=True):
    """Options of `quire bench tradeoffs`."""

    plot: Annotated[str, _doc("Picture of quality against speed: a .png (needs matplotlib) or an .html.")] = ""

    texts: Annotated[
        list[str], _doc("Text files on which quality is told; those of no training and no calibration.")
    ] = msgspec.field(default_factory=list)
    calibrate: Annotated[str, _doc("Text file with which folders are made, see `quire quantize`; needed.")] = ""
    samples: Annotated[int, _doc("Most pieces of it.", ge=1, le=1 << 16)] = 128
    sample_tokens: Annotated[int, _doc("Tokens of a piece.", ge=8, le=1 << 20)] = 512
    window: Annotated[int, _doc("Tokens of a text that are read together; fewer than the context has.", ge=2)] = 512
    batch_sizes: Annotated[
        list[BatchSize], _doc("Sequences that are generated at once; the plot has the first.")
    ] = msgspec.field(default_factory=lambda: [1, 16])
    output_len: Annotated[int, _doc("Tokens to generate.", ge=2)] = 128
    num_iters: Annotated[int, _doc("Timed turns of each variant and of the model as it is.", ge=1)] = 3
    tasks: Annotated[
        str, _doc("File of questions with answers: a line is a JSON object with prompt, answer, and perhaps pattern "
                  "and task, see docs/bench.md; default: none are asked.")
    ] = ""  # fmt: skip
    task_output_len: Annotated[int, _doc("Most tokens of a reply to a question.", ge=1)] = 160
    models: Annotated[list[str], _doc("Other checkpoints to compare, such as smaller ones; of any tokenizer.")] = (
        msgspec.field(default_factory=list)
    )
    exit_layers: Annotated[
        list[Annotated[int, Meta(ge=1)]],
        _doc("Layers after which tokens may leave early; default: a half and three quarters of them."),
    ] = msgspec.field(default_factory=list)
    exit_thresholds: Annotated[
        list[Annotated[float, Meta(gt=0, le=1)]],
        _doc("Probability of the best token there from which on it leaves."),
    ] = msgspec.field(default_factory=lambda: [0.9, 0.99])
