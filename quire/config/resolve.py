"""From options that say 'choose for me' to numbers, given the model and the kind of device. Torch-free.

Owns the defaults that depend on both. Does not own memory (`planner/memory`).
"""

from __future__ import annotations

import msgspec

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.speculative import SpeculativeConfig, read_speculative
from quire.core.errors import ConfigError, shown


class AdapterLimits(msgspec.Struct, frozen=True):
    """Adapters that one engine may have."""

    max_rank: int
    n_kept: int
    """On the host."""
    in_main: bool
    """The device's memory is the host's."""
    with_experts: bool = False


class EngineLimits(msgspec.Struct, frozen=True):
    """What one engine may do at once."""

    dtype: str
    """'bfloat16', 'float16' or 'float32'."""
    kv_dtype: str
    """Of keys and values in the cache: `dtype`, 'fp8' or 'int8'."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_drafts: int = 0
    """Most drafts of a sequence in a step."""
    max_stall_factor: float = 0.0
    """As `Pace.factor`; 0: prompts are cut by the token budget only."""
    adapters: AdapterLimits | None = None
    on_gpu: bool = False
    on_hopper: bool = False
    """Kernels in CUDA C++ run on this GPU: prompts read widened keys, and sums go through memory that GPUs share."""

    @property
    def max_sampled(self) -> int:
        """Most tokens that one step chooses: one for each sequence, or one sequence with all its drafts."""
        return max(self.max_num_seqs, 1 + self.max_drafts)


KEPT_FACTOR = 4
"""Adapters on the host for each place on the device, where nobody says how many."""
NOT_ROUNDED = ("auto", "none")
"""Values of `quantization` that every device takes."""
ROUNDED_ON = {
    "fp8": ("cuda",), "int8": ("cpu", "cuda"), "int8-g32": ("cpu",), "int4": ("cpu", "cuda"),
    "int4-g32": ("cpu", "cuda"), "int4-g128": ("cpu", "cuda"),
}  # fmt: skip
"""Those to which weights are rounded → the devices that do it."""
KV_ROUNDED = {"fp8": ("fp8", ("cuda",)), "fp8_e4m3": ("fp8", ("cuda",)), "int8": ("int8", ("cpu", "cuda"))}
"""Value of `kv_cache_dtype` → its name in `EngineLimits`, and the devices that take it."""
DEFAULT_SEQS = {"cuda": 1024, "cpu": 64, "null": 256}
DEFAULT_BATCHED_TOKENS = {"cuda": 8192, "cpu": 1024, "null": 8192}

MIN_SHARED_TOKENS = {"cuda": 256, "cpu": 0, "null": 0}
"""Shortest common prefix that attention reads once for several sequences; 0: it reads each sequence's own."""

DEFAULT_STALL_FACTOR = {"cuda": 1.75, "cpu": 0.0, "null": 0.0}
"""Of a server (docs/decisions/0006). On a CPU the estimate is too rough to be a default."""


def resolve(
    config: EngineConfig, arch: ModelArch, device: str, *, is_server: bool = False, on_hopper: bool = False
) -> EngineLimits:
    """Limits for 'cuda', 'cpu' or 'null'. Raises ConfigError where an option exceeds what the model can do.

    is_server: latency counts as well as throughput. on_hopper: see `EngineLimits`.
    """
    check_length(config, arch)
    check_rounding(config, device)
    speculative = read_speculative(config.speculative_config)
    _check_speculative(config, speculative, device)
    max_num_seqs = config.max_num_seqs or _usual_seqs(config.max_num_batched_tokens, device)
    dtype = arch.dtype if config.dtype == "auto" else config.dtype
    return EngineLimits(
        dtype=dtype,
        kv_dtype=kv_dtype(config.kv_cache_dtype, dtype, device, arch),
        max_model_len=config.max_model_len or arch.max_position,
        max_num_seqs=max_num_seqs,
        max_drafts=0 if speculative is None else speculative.n_drafts,
        max_num_batched_tokens=config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device], max_num_seqs),
        max_stall_factor=config.max_stall_factor or (DEFAULT_STALL_FACTOR[device] if is_server else 0.0),
        adapters=_adapter_limits(config, device),
        on_gpu=device == "cuda",
        on_hopper=on_hopper,
    )


def check_length(config: EngineConfig, arch: ModelArch) -> None:
    """ConfigError where sequences may be longer than the model can do."""
    if config.max_model_len > arch.max_position_scaled:
        raise ConfigError(
            f"max_model_len = {config.max_model_len} exceeds the {arch.max_position_scaled} positions of this model: "
            "lower it, or add rope scaling to config.json"
        )


def check_rounding(config: EngineConfig, device: str) -> None:
    """ConfigError where weights are not rounded to `quantization` on 'cuda', 'cpu' or 'null'."""
    if config.quantization in NOT_ROUNDED or rounds_to(config.quantization, device):
        return
    devices = ROUNDED_ON[config.quantization]
    other = " and ".join({"cpu": "the CPU", "cuda": "GPUs"}[one] for one in devices)
    instead = "add --device cpu, or leave --quantization out" if "cpu" in devices else "leave --quantization out"
    raise ConfigError(
        f"quantization = {config.quantization!r} works on {other} only and the device is {device}: {instead}",
        param="quantization",
    )


def _adapter_limits(config: EngineConfig, device: str) -> AdapterLimits | None:
    if not config.enable_lora:
        return None
    return AdapterLimits(config.max_lora_rank, n_kept(config), device == "cpu", config.lora_experts)


def n_kept(config: EngineConfig) -> int:
    """Adapters that the host keeps at most."""
    return config.max_cpu_loras or KEPT_FACTOR * config.max_loras


def rounds_to(quantization: str, device: str) -> bool:
    """Whether weights are rounded to this value of `quantization` on 'cuda', 'cpu' or 'null'."""
    return device in ROUNDED_ON[quantization]


def _check_speculative(config: EngineConfig, speculative: SpeculativeConfig | None, device: str) -> None:
    if speculative is None:
        return
    what = f"speculative_config = {shown(config.speculative_config)}"
    if device == "null":
        raise ConfigError(
            f"{what} needs a model and the device is null, which has none: add --device cpu or cuda, or leave "
            "--speculative-config out",
            param="speculative_config",
        )


def kv_dtype(asked: str, dtype: str, device: str, arch: ModelArch) -> str:
    """'int8', 'fp8' on a GPU, or the type of the activations. Raises ConfigError where the model has no such cache."""
    if asked in KV_ROUNDED:
        if not arch.kv_specs:
            raise ConfigError(
                f"kv_cache_dtype = {asked!r} rounds keys and values, and {arch.family} keeps none: leave "
                "--kv-cache-dtype out",
                param="kv_cache_dtype",
            )
        if arch.keeps_lines:
            raise ConfigError(
                f"kv_cache_dtype = {asked!r} rounds keys and values of heads, and {arch.family} keeps a line a token "
                "for all heads: leave --kv-cache-dtype out",
                param="kv_cache_dtype",
            )
        name, devices = KV_ROUNDED[asked]
        if device not in devices:
            there = [f"--kv-cache-dtype {one}" for one, (_, places) in KV_ROUNDED.items() if device in places][:1]
            raise ConfigError(
                f"kv_cache_dtype = {asked!r} works on {' and '.join(devices)} only and the device is {device}, which "
                f"takes {' or '.join([*there, f'auto ({dtype})'])}: give that, or add --device {devices[0]}",
                param="kv_cache_dtype",
            )
        return name
    wanted = "bfloat16" if asked == "bf16" else asked
    if wanted not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype = {asked!r} but dtype is {dtype}: keys and values are of the type of the activations or "
            f"of 8 bits; leave --kv-cache-dtype out, or add --dtype {wanted}",
            param="kv_cache_dtype",
        )
    return dtype


def _usual_seqs(n_tokens: int, device: str) -> int:
    """Those that decode have a token each of a step: half of a small one is left to prompts."""
    usual = DEFAULT_SEQS[device]
    return usual if not n_tokens or n_tokens >= usual else max(1, n_tokens // 2)

