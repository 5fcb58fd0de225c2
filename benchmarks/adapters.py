"""What adapters cost: tokens a second of a batch in which all have one, over those of the same batch without.

    python -m benchmarks.adapters [MODEL] [--device cuda] [--adapters 16] [--rank 16] [--batch 64] [--json FILE]

Adapters are random, of every linear layer of a Llama. Both kinds of batch take turns; each ratio is of neighbours.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.bench.report import build_report, write_report
from quire.compute.weights.hub import find_checkpoint
from quire.config.model import read_arch
from quire.config.parameters import layer_parameters


def write(folder: pathlib.Path, model: str, rank: int, seed: int) -> LoRARequest:
    """A random adapter of `model` in PEFT's layout."""
    arch, generator, tensors = read_arch(find_checkpoint(model)), torch.Generator().manual_seed(seed), {}
    for layer, spec in enumerate(arch.layers):
        for matrix in layer_parameters(spec, arch.hidden_size, layer).matrices:
            for name, rows in matrix.parts:
                for kind, shape in (("A", (rank, matrix.n_in)), ("B", (rows, rank))):
                    numbers = torch.randn(shape, generator=generator) / 100
                    tensors[f"base_model.model.{name}.lora_{kind}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, 1, str(folder))


def main() -> None:
    """Print the ratio of each repetition, and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    for name, default in (("adapters", 16), ("rank", 16), ("batch", 64), ("prompt", 64), ("output", 64), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", default="", help="file for every repetition, with commit, hardware and command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = [write(pathlib.Path(folder, f"a{i}"), given.model, given.rank, i) for i in range(given.adapters)]
        llm = LLM(
            given.model, device=given.device, load_format=given.load_format, enable_lora=True, max_loras=given.adapters,
            max_lora_rank=given.rank, max_num_seqs=given.batch, enable_prefix_caching=False, skip_tokenizer_init=True,
        )  # fmt: skip
        ids = torch.randint(0, llm.logits_width // 2, (given.batch, given.prompt)).tolist()
        params = SamplingParams(temperature=0, max_tokens=given.output, ignore_eos=True, detokenize=False)
        mixed = [made[i % len(made)] for i in range(given.batch)]

        def tokens_per_s(requests: list[LoRARequest] | None) -> float:
            start_s = time.perf_counter()
            llm.generate([{"prompt_token_ids": one} for one in ids], params, False, requests)
            return given.batch * given.output / (time.perf_counter() - start_s)

        tokens_per_s(mixed)
        ratios, rows = [], []
        for _ in range(given.times):
            base, own = tokens_per_s(None), tokens_per_s(mixed)
            ratios.append(own / base)
            rows.append({"without_tokens_per_second": base, "with_tokens_per_second": own, "ratio": ratios[-1]})
            print(f"without {base:,.0f} tokens/s, with {own:,.0f}: {ratios[-1]:.3f}")
        print(f"{given.adapters} adapters of rank {given.rank}, batch {given.batch}: {statistics.median(ratios):.3f}")
        llm.shutdown()
    if given.json:
        settings = {name: value for name, value in vars(given).items() if name not in ("model", "json")}
        settings["model"] = pathlib.Path(given.model).name
        write_report(given.json, build_report("adapters", settings, {"rows": rows, "ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
