"""The sampler: from logits and slots to token ids."""

from quire.compute.sample.logprobs import LogprobTensors, packed_logprobs, prompt_logprobs, token_logprobs
from quire.compute.sample.sampler import FAULT_CODES, Sampled, Sampler

__all__ = [
    "FAULT_CODES",
    "LogprobTensors",
    "Sampled",
    "Sampler",
    "packed_logprobs",
    "prompt_logprobs",
    "token_logprobs",
]
