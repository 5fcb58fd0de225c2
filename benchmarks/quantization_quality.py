"""What `--quantization` and `--kv-cache-dtype int8` cost in quality: the demo model on held-out text and tasks, and
logits of a random model.

    python -m benchmarks.quantization_quality
    python -m benchmarks.quantization_quality --peers ~/.cache/quire/peers    # llama.cpp beside it, see cpu_peers

Bits per byte and tasks are those of `demo/evaluate.py`, on fewer documents and examples. The random model has the
widths of Qwen3-0.6B, fewer layers and weights drawn from normal(0, 0.02), which have no outliers; its logits are
compared with those of the same weights in float32. llama.cpp rounds the same weights to its own types.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.peers.models import random_checkpoint
from benchmarks.peers.quality import PeerLogits, environment_of, rounded
from demo import corpus
from demo.dialogues import TASKS, prompt_of, task_examples
from demo.evaluate import COMPARE, MAX_NEW_TOKENS, MODELS, bits_per_byte
from quire import LLM, SamplingParams
from quire.bench.machine import n_cores
from quire.bench.report import build_report, write_report
from quire.compute.device.cpu import CpuDevice
from quire.compute.models.decoder import Decoder
from quire.compute.runner.pool import KVPool, PagedContext, plan_attention
from quire.compute.runner.tables import SlotTables
from quire.compute.weights.loader import load_model
from quire.config.model import read_arch

RESULT = pathlib.Path(__file__).with_name("results") / "quantization_quality.json"
SCHEMES = {
    "none": ("none", "auto"),
    "int8": ("int8", "auto"),
    "int8-g32": ("int8-g32", "auto"),
    "int4": ("int4", "auto"),
    "int4-g32": ("int4-g32", "auto"),
    "int4-g128": ("int4-g128", "auto"),
    "kv int8": ("none", "int8"),
    "int8, kv int8": ("int8", "int8"),
}
"""Name → quantization, kv_cache_dtype."""
PAGE = 16
SHAPE = "qwen3-0.6b"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8, help="held-out documents of each kind")
    parser.add_argument("--n", type=int, default=100, help="examples of each task")
    parser.add_argument("--layers", type=int, default=4, help="layers of the random model")
    parser.add_argument("--prompts", type=int, default=8, help="random prompts of 128 tokens for it")
    parser.add_argument("--threads", type=int, default=n_cores())
    parser.add_argument("--peers", default="", help="folder of cpu_peers: llama.cpp's types as well")
    parser.add_argument("--output", default=str(RESULT))
    return parser.parse_args()


class Prefill:
    """Logits of whole prompts: a loaded model over a KV pool of one sequence."""

    def __init__(self, model: Decoder, kv_dtype: torch.dtype, length: int, device: CpuDevice) -> None:
        n_pages = 1 + -(-length // PAGE)
        self.model = model
        self.pool = KVPool(model.arch, n_pages, PAGE, kv_dtype, device)
        self.tables = SlotTables(1, length, PAGE, device)
        self.tables.pages[0, 0, : n_pages - 1] = torch.arange(1, n_pages)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [1, n] → float32 [1, n, vocab]."""
        n = ids.shape[1]
        bounds = np.array([0, n], dtype=np.int32)
        plans = plan_attention(self.pool, self.tables, bounds[1:], np.zeros(1, dtype=np.int32), bounds)
        positions = torch.arange(n)
        context = PagedContext(self.pool, plans, [positions + PAGE])  # the sequence's pages follow the dummy page
        return self.model.logits(self.model.forward(ids[0], positions, context))[None]


def load(folder: pathlib.Path, scheme: str, dtype: torch.dtype, length: int, device: CpuDevice) -> Prefill:
    quantization, kv_dtype = SCHEMES[scheme]
    model = load_model(
        folder, read_arch(folder), dtype=dtype, device=device.torch_device, max_model_len=length,
        quantization=quantization, progress=False,
    )  # fmt: skip
    return Prefill(model, torch.int8 if kv_dtype == "int8" else dtype, length, device)


def some(documents: list[corpus.Document], n: int) -> list[corpus.Document]:
    """The first `n` held-out documents of each kind."""
    held_out = [one for one in documents if one.held_out]
    return [one for kind in ("code", "tests", "docs") for one in [d for d in held_out if d.kind == kind][:n]]


def peers(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[tuple[str, PeerLogits]]:
    """llama.cpp on the checkpoint in `folder`, type after type; nothing without --peers."""
    if not args.peers:
        return
    environment = environment_of(pathlib.Path(args.peers))
    with tempfile.TemporaryDirectory() as name:
        for dtype, path in rounded(environment, folder, pathlib.Path(name)).items():
            peer = PeerLogits(environment, path, args.threads)
            yield f"llama.cpp {dtype}", peer
            peer.close()


def replies(scheme: str, tokenizer: Tokenizer, n: int, threads: int) -> dict[str, list[str]]:
    """Greedy replies of the engine to `n` held-out examples of each task."""
    quantization, kv_dtype = SCHEMES[scheme]
    options = {"quantization": quantization, "kv_cache_dtype": kv_dtype}
    llm = LLM(str(MODELS / "demo"), **options, device="cpu", num_threads=threads)  # type: ignore[arg-type]
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


def peer_replies(peer: PeerLogits, tokenizer: Tokenizer, n: int) -> dict[str, list[str]]:
    """`replies` of llama.cpp."""
    found = {}
    for name in TASKS:
        prompts = [tokenizer.encode(prompt_of(one)).ids for one in task_examples(name, n)]
        found[name] = [tokenizer.decode(ids) for ids in peer.replies(prompts, MAX_NEW_TOKENS)]
    return found


def demo_figures(args: argparse.Namespace, device: CpuDevice) -> dict[str, dict[str, object]]:
    """Bits per byte, accuracy of each task, and replies that equal our bf16's, for each scheme and type."""
    folder = MODELS / "demo"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = some(corpus.load(None), args.documents)
    results: dict[str, dict[str, object]] = {}
    plain: dict[str, list[str]] = {}

    def add(name: str, logits: Prefill | PeerLogits, n_bytes: int, given: dict[str, list[str]]) -> None:
        held_out = bits_per_byte(logits, tokenizer, documents, "cpu")  # type: ignore[arg-type]
        right = {task: n_right(task, texts) for task, texts in given.items()}
        same = sum(a == b for task in given for a, b in zip(given[task], (plain or given)[task], strict=True))
        results[name] = {
            "weights_bytes": n_bytes,
            "bits_per_byte": {kind: figures["bits_per_byte"] for kind, figures in held_out.items()},
            "accuracy": sum(right.values()) / (args.n * len(right)),
            "replies_equal_to_bf16": same / (args.n * len(right)),
            "tasks": {task: count / args.n for task, count in right.items()},
        }
        print(name, json.dumps(results[name]), flush=True)

    for scheme in SCHEMES:
        prefill = load(folder, scheme, torch.bfloat16, 2048, device)
        given = replies(scheme, tokenizer, args.n, args.threads)
        add(scheme, prefill, prefill.model.n_bytes, given)
        plain = plain or given
    for name, peer in peers(args, folder):
        add(name, peer, peer.n_bytes, peer_replies(peer, tokenizer, args.n))
    return results


def compared(
    logits: Callable[[torch.Tensor], torch.Tensor], prompts: torch.Tensor, expected: list[torch.Tensor]
) -> dict[str, float]:
    """Error relative to the spread of the expected logits, and how often the best token is the same."""
    error, spread, agreed = 0.0, 0.0, 0.0
    for ids, wanted in zip(prompts, expected, strict=True):
        got = logits(ids)[0]
        error += float((got - wanted).square().sum())
        spread += float((wanted - wanted.mean(1, keepdim=True)).square().sum())
        agreed += float((got.argmax(1) == wanted.argmax(1)).float().mean())
    return {"relative_logit_error": (error / spread) ** 0.5, "top1_agreement_with_float32": agreed / len(prompts)}


def shape_figures(args: argparse.Namespace, device: CpuDevice) -> dict[str, dict[str, float]]:
    """Logits of a random model beside float32's, for each scheme and type."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        random_checkpoint(folder, SHAPE, args.layers)
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1000, 150_000, (args.prompts, 1, 128), generator=generator)
        exact = load(folder, "none", torch.float32, 128, device)
        expected = [exact(ids)[0] for ids in prompts]
        del exact

        def add(name: str, logits: Prefill | PeerLogits, n_bytes: int) -> None:
            results[name] = {"weights_bytes": n_bytes, **compared(logits, prompts, expected)}
            print(name, json.dumps(results[name]), flush=True)

        for scheme in SCHEMES:
            prefill = load(folder, scheme, torch.bfloat16, 128, device)
            add(scheme, prefill, prefill.model.n_bytes)
        for label, peer in peers(args, folder):
            add(label, peer, peer.n_bytes)
    return results


def main() -> None:
    args = parse_arguments()
    device = CpuDevice(args.threads)
    results = {"random_qwen3_0.6b": shape_figures(args, device), "demo": demo_figures(args, device)}
    write_report(args.output, build_report("quantization_quality", vars(args), results))


if __name__ == "__main__":
    main()
