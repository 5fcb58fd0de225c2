"""Pages that beams and parallel samples hold, against separate sequences.

    python -m benchmarks.beam_pages --output benchmarks/results/beam_pages.json

The real engine on a CPU, with the bundled demo model and text that it continues, or with a tiny model of random
weights: pages depend on lengths, and on which beams survive. Separate sequences share nothing (each has a salt of its
own). Prints a table for each length; docs/lab-notes.md has it.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import tempfile
import time
from typing import Any, Final

from quire import LLM, BeamSearchParams, SamplingParams
from quire.bench.report import build_report, check_report_path, write_report

N_OUTPUTS: Final = 200
VOCAB: Final = 256
"""Of the model of random weights."""
TEXT: Final = pathlib.Path(__file__).resolve().parents[1] / "quire" / "control" / "scheduler.py"
"""What the demo model continues."""
Peaks = tuple[int, float, int, float]


def peaks(llm: LLM, run: Any) -> Peaks:
    """(most pages held, mean of a step, most pages saved at once, seconds)."""
    held: list[int] = []
    saved: list[int] = []

    def look(_record: object) -> None:
        stats = llm.engine.stats(with_map=False)
        if stats.n_running:
            held.append(stats.n_slots_taken // llm.config.block_size)
            saved.append(stats.n_pages_saved)

    llm.on_step = look
    began_s = time.perf_counter()
    run()
    seconds = time.perf_counter() - began_s
    llm.on_step = None
    llm.reset_prefix_cache()
    return max(held), sum(held) / len(held), max(saved), seconds


def prompt_of(llm: LLM, n: int) -> list[int]:
    """So many ids: of the text where there is a tokenizer, else random ones."""
    if llm.tokenizer is None:
        return random.Random(0).choices(range(1, VOCAB), k=n)
    ids: list[int] = llm.tokenizer.encode(TEXT.read_text())
    return ids[:n]


def separate(llm: LLM, prompt: list[int], n: int) -> Peaks:
    """The same prompt `n` times, and nothing in common."""
    items: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i in range(n)]
    params = SamplingParams(temperature=1.0, max_tokens=N_OUTPUTS, ignore_eos=True)
    return peaks(llm, lambda: llm.generate(items, params, use_tqdm=False))


def samples(llm: LLM, prompt: list[int], n: int) -> Peaks:
    """`n` samples of one request."""
    params = SamplingParams(n=n, temperature=1.0, max_tokens=N_OUTPUTS, ignore_eos=True)
    return peaks(llm, lambda: llm.generate([prompt], params, use_tqdm=False))


def beams(llm: LLM, prompt: list[int], width: int) -> Peaks:
    """One beam search."""
    params = BeamSearchParams(beam_width=width, max_tokens=N_OUTPUTS, ignore_eos=True)
    return peaks(llm, lambda: llm.beam_search([prompt], params))


def main() -> None:
    """Print the tables."""
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("--random", action="store_true", help="a tiny model of random weights, not the demo model")
    parser.add_argument("--prompt-lens", type=int, nargs="*", default=[1000, 100])
    parser.add_argument("--output", default="", help="a JSON file")
    asked = parser.parse_args()
    if asked.output:
        check_report_path(asked.output, "--output")
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=None,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(pathlib.Path(folder))
        options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 32, "num_gpu_blocks_override": 4000}
        if asked.random:
            options |= {"model": folder, "dtype": "float32", "skip_tokenizer_init": True}
        llm = LLM(**options)
        rows = [row for length in asked.prompt_lens for row in table(llm, prompt_of(llm, length))]
        page_size = llm.config.block_size
        llm.shutdown()
    if asked.output:
        results = {"page_size": page_size, "n_outputs": N_OUTPUTS, "rows": rows}
        write_report(asked.output, build_report("beam_pages", vars(asked), results))


def table(llm: LLM, prompt: list[int]) -> list[dict[str, Any]]:
    """Of one prompt, printed; its rows."""
    rows = list[dict[str, Any]]()
    print(f"prompt of {len(prompt)}, {N_OUTPUTS} outputs, pages of {llm.config.block_size}")
    print("| | most pages | mean | seconds | saved of the most | saved of the mean |\n|---|---|---|---|---|---|")
    for name, run, n in (("beams", beams, 4), ("beams", beams, 8), ("samples", samples, 16)):
        alone, mean_alone, _, separate_s = separate(llm, prompt, n)
        most, mean, saved, seconds = run(llm, prompt, n)
        print(f"| {n} separate | {alone} | {mean_alone:.0f} | {separate_s:.2f} | | |")
        shares = f"{1 - most / alone:.1%} ({saved} at once) | {1 - mean / mean_alone:.1%}"
        print(f"| {n} {name} | {most} | {mean:.0f} | {seconds:.2f} | {shares} |")
        rows.append({
            "prompt_len": len(prompt), "kind": name, "n": n,
            "most_pages_separate": alone, "most_pages": most, "saved_of_most": round(1 - most / alone, 4),
            "mean_pages_separate": round(mean_alone, 1), "mean_pages": round(mean, 1),
            "saved_of_mean": round(1 - mean / mean_alone, 4), "most_saved_at_once": saved,
            "seconds_separate": round(separate_s, 3), "seconds": round(seconds, 3),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
