"""What constrained output costs: the same lengths with a JSON schema and without, in alternating pairs.

    python -m benchmarks.constrained --model FOLDER --load-format dummy --batch 64 256
    python -m benchmarks.constrained --model quire/_models/demo --mixed

`--mixed` constrains every second sequence. The schema asks for more items than fit, so that every output is as long as
a free one; `--ignore-eos` of the free runs does the rest. Needs a folder with a tokenizer.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time

from quire import LLM, SamplingParams
from quire.bench.report import build_report, write_report
from quire.core.structured import StructuredOutputsParams

RESULT = pathlib.Path(__file__).with_name("results") / "constrained.json"
PLAIN = {
    "kind": {"enum": ["dog", "cat", "bird"]},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "score": {"type": "number"},
    "alive": {"type": "boolean"},
    "name": {"type": "string"},
}
COUNTED = PLAIN | {
    "name": {"type": "string", "maxLength": 40},
    "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
}


def schema_of(properties: dict[str, object]) -> dict[str, object]:
    """An array of more objects than fit."""
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 2000}


SCHEMAS = {"plain": schema_of(PLAIN), "counted": schema_of(COUNTED)}
"""counted: strings with lengths and patterns, whose masks take ten times as long when random tokens fill them."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--schema", choices=[*SCHEMAS], default="plain")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--output", default=str(RESULT))
    return parser.parse_args()


def run(llm: LLM, batch: int, args: argparse.Namespace, constrained: bool, seed: int) -> float:
    """Output tokens a second of one batch of fresh random prompts."""
    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(300, 4000) for _ in range(args.input_len)]} for _ in range(batch)]
    free = SamplingParams(max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    bound = SamplingParams(
        max_tokens=args.output_len,
        detokenize=False,
        structured_outputs=StructuredOutputsParams(json=SCHEMAS[args.schema]),
    )
    params = [bound if constrained and (i % 2 == 0 or not args.mixed) else free for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    lengths = {len(each.outputs[0].token_ids) for each in outputs}
    if lengths != {args.output_len}:
        raise SystemExit(f"outputs have {sorted(lengths)} tokens, all should have {args.output_len}")
    return batch * args.output_len / seconds


def main() -> None:
    args = parse_arguments()
    llm = LLM(
        args.model, load_format=args.load_format, quantization=args.quantization, enable_prefix_caching=False,
        max_model_len=args.input_len + args.output_len + 16,
    )  # fmt: skip
    rows = []
    for batch in args.batch:
        pairs = [
            (run(llm, batch, args, False, 2 * i), run(llm, batch, args, True, 2 * i + 1))
            for i in range(-1, args.pairs)
        ][1:]  # fmt: skip
        ratio = statistics.median(bound / free for free, bound in pairs)
        rows.append({"batch": batch, "pairs_tok_s": pairs, "ratio": ratio})
        free, bound = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"batch {batch:4d}: free {free:9.1f} tok/s, constrained {bound:9.1f} tok/s, ratio {ratio:.3f}", flush=True
        )
    write_report(args.output, build_report("constrained", {k: str(v) for k, v in vars(args).items()}, {"rows": rows}))


if __name__ == "__main__":
    main()
