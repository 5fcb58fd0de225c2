"""What `--quantization` costs in quality: the demo model on held-out text and tasks, and logits of a random model.

    python -m benchmarks.quantization_quality

Bits per byte and tasks are those of `demo/evaluate.py`, on fewer documents and examples. The random model has the
widths of Qwen3-0.6B, fewer layers and weights drawn from normal(0, 0.02), which have no outliers; its logits are
compared with those of the same weights in float32.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import tempfile

import numpy as np
import safetensors.torch
import torch
from tokenizers import Tokenizer

from demo import corpus
from demo.dialogues import TASKS, prompt_of, task_examples
from demo.evaluate import COMPARE, MAX_NEW_TOKENS, MODELS, bits_per_byte
from quire import LLM, SamplingParams
from quire.bench.machine import n_cores
from quire.bench.report import build_report, write_report
from quire.bench.shape import FOLDER
from quire.compute.device.cpu import CpuDevice
from quire.compute.models.dense import DenseModel
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.compute.weights.dummy import fill_random
from quire.compute.weights.loader import load_model
from quire.config.arch import read_arch

RESULT = pathlib.Path(__file__).with_name("results") / "quantization_quality.json"
SCHEMES = ("none", "int8", "int4")
PAGE = 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8, help="held-out documents of each kind")
    parser.add_argument("--n", type=int, default=100, help="examples of each task")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--prompts", type=int, default=8, help="random prompts of 128 tokens for it")
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--output", default=str(RESULT))
    return parser.parse_args()


class Prefill:
    """Logits of whole prompts: a loaded model over a KV pool of one sequence."""

    def __init__(self, model: DenseModel, dtype: torch.dtype, length: int, device: CpuDevice) -> None:
        n_pages = 1 + -(-length // PAGE)
        self.model = model
        self.pool = KVPool(model.arch, n_pages, PAGE, dtype, device)
        self.tables = SlotTables(1, length, PAGE, device)
        self.tables.pages[0, : n_pages - 1] = torch.arange(1, n_pages)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [1, n] → float32 [1, n, vocab]."""
        n = ids.shape[1]
        bounds = np.array([0, n], dtype=np.int32)
        plan = plan_attention(self.pool, self.tables, bounds[1:], np.zeros(1, dtype=np.int32), bounds)
        positions = torch.arange(n)
        context = PagedContext(self.pool, plan, positions + PAGE)  # the sequence's pages follow the dummy page
        return self.model.logits(self.model.forward(ids[0], positions, context))[None]


def load(folder: pathlib.Path, quantization: str, dtype: torch.dtype, length: int, device: CpuDevice) -> Prefill:
    model = load_model(
        folder, read_arch(folder), dtype=dtype, device=device.torch_device, max_model_len=length,
        quantization=quantization, progress=False,
    )  # fmt: skip
    return Prefill(model, dtype, length, device)


def some(documents: list[corpus.Document], n: int) -> list[corpus.Document]:
    """The first `n` held-out documents of each kind."""
    held_out = [one for one in documents if one.held_out]
    return [one for kind in ("code", "tests", "docs") for one in [d for d in held_out if d.kind == kind][:n]]


def replies(quantization: str, tokenizer: Tokenizer, n: int, threads: int) -> dict[str, list[str]]:
    """Greedy replies of the engine to `n` held-out examples of each task."""
    llm = LLM(str(MODELS / "demo"), quantization=quantization, device="cpu", num_threads=threads)
    params = SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS, detokenize=False)
    found = {}
    for name in TASKS:
        prompts = [{"prompt_token_ids": tokenizer.encode(prompt_of(one)).ids} for one in task_examples(name, n)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found[name] = [tokenizer.decode(one.outputs[0].token_ids, skip_special_tokens=True) for one in outputs]
    llm.shutdown()
    return found


def n_right(task: str, texts: list[str]) -> int:
    """How many of a task's replies are right."""
    compare = COMPARE[TASKS[task][1]]
    return sum(compare(text, one.answer) for text, one in zip(texts, task_examples(task, len(texts)), strict=True))


def demo_figures(args: argparse.Namespace, device: CpuDevice) -> dict[str, dict[str, object]]:
    """Bits per byte, accuracy of each task, and replies that equal those of bf16, for each scheme."""
    folder = MODELS / "demo"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = some(corpus.load(None), args.documents)
    results: dict[str, dict[str, object]] = {}
    plain: dict[str, list[str]] = {}
    for scheme in SCHEMES:
        prefill = load(folder, scheme, torch.bfloat16, 2048, device)
        held_out = bits_per_byte(prefill, tokenizer, documents, "cpu")  # type: ignore[arg-type]
        given = replies(scheme, tokenizer, args.n, args.threads)
        plain = plain or given
        right = {name: n_right(name, texts) for name, texts in given.items()}
        same = sum(a == b for name in given for a, b in zip(given[name], plain[name], strict=True))
        results[scheme] = {
            "weights_bytes": prefill.model.n_bytes,
            "bits_per_byte": {kind: figures["bits_per_byte"] for kind, figures in held_out.items()},
            "accuracy": sum(right.values()) / (args.n * len(right)),
            "replies_equal_to_bf16": same / (args.n * len(right)),
            "tasks": {name: count / args.n for name, count in right.items()},
        }
        print(scheme, json.dumps(results[scheme]), flush=True)
    return results


def random_checkpoint(folder: pathlib.Path, n_layers: int) -> None:
    """Weights of `--load-format dummy` in bf16, as a file, so that float32 and bf16 read the same numbers."""
    config = json.loads((FOLDER / "qwen3-0.6b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": n_layers}))
    arch = read_arch(folder)
    make = functools.partial(torch.empty, dtype=torch.bfloat16)
    weights = dict(DenseModel(arch, make, torch.empty(0)).weights())
    fill_random(weights.items(), 0, torch.device("cpu"))
    safetensors.torch.save_file({name: one.clone() for name, one in weights.items()}, folder / "model.safetensors")


def shape_figures(args: argparse.Namespace, device: CpuDevice) -> dict[str, dict[str, float]]:
    """Error of the logits relative to their spread in float32, and how often the best token is the same."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        random_checkpoint(folder, args.layers)
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1000, 150_000, (args.prompts, 1, 128), generator=generator)
        exact = load(folder, "none", torch.float32, 128, device)
        expected = [exact(ids)[0] for ids in prompts]
        del exact
        for scheme in SCHEMES:
            prefill = load(folder, scheme, torch.bfloat16, 128, device)
            error, spread, agreed = 0.0, 0.0, 0.0
            for ids, wanted in zip(prompts, expected, strict=True):
                got = prefill(ids)[0]
                error += float((got - wanted).square().sum())
                spread += float((wanted - wanted.mean(1, keepdim=True)).square().sum())
                agreed += float((got.argmax(1) == wanted.argmax(1)).float().mean())
            results[scheme] = {
                "weights_bytes": prefill.model.n_bytes,
                "relative_logit_error": (error / spread) ** 0.5,
                "top1_agreement_with_float32": agreed / len(prompts),
            }
            print(scheme, json.dumps(results[scheme]), flush=True)
    return results


def main() -> None:
    args = parse_arguments()
    device = CpuDevice(args.threads)
    results = {"random_qwen3_0.6b": shape_figures(args, device), "demo": demo_figures(args, device)}
    write_report(args.output, build_report("quantization_quality", vars(args), results))


if __name__ == "__main__":
    main()
