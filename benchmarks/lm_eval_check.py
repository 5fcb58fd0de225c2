"""lm-eval's `local-completions` on a running Quire server against its `hf` model (transformers) on the same files.

Prints the largest difference of log-likelihoods over all choices. lm-eval is not a dependency of Quire; run this with a
Python that has `lm-eval[api]`, torch and transformers, from the repository's root, while `quire serve` runs:

    python benchmarks/lm_eval_check.py --base-url http://127.0.0.1:8000 --model demo --checkpoint quire/_models/demo
"""

from __future__ import annotations

import argparse
import json
import pathlib

import lm_eval
from lm_eval.tasks import TaskManager

FOLDER = pathlib.Path(__file__).with_name("lm_eval_task")


def log_likelihoods(model: str, arguments: str) -> list[float]:
    """One number for each choice of each question, in order."""
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["quire_local"], task_manager=manager, log_samples=True, batch_size=1
    )
    samples = sorted(found["samples"]["quire_local"], key=lambda sample: sample["doc_id"])
    return [float(response[0]) for sample in samples for response in sample["filtered_resps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkpoint", default="quire/_models/demo")
    parser.add_argument("--dtype", default="bfloat16", help="of transformers; the server's own unless told otherwise")
    options = parser.parse_args()
    served = log_likelihoods(
        "local-completions",
        f"model={options.model},base_url={options.base_url}/v1/completions,tokenizer={options.checkpoint},"
        "tokenizer_backend=huggingface,tokenized_requests=True,num_concurrent=4,max_retries=1",
    )
    local = log_likelihoods("hf", f"pretrained={options.checkpoint},dtype={options.dtype},device=cpu")
    differences = [abs(a - b) for a, b in zip(served, local, strict=True)]
    print(json.dumps({"n_choices": len(served), "largest_difference": max(differences)}))


if __name__ == "__main__":
    main()
