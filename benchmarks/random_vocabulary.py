"""A bundled shape with a tokenizer as wide as its logits: for the speed of grammars, without a checkpoint.

    python -m benchmarks.random_vocabulary shape:qwen3-0.6b FOLDER
    python -m benchmarks.constrained --model FOLDER --load-format dummy --batch 256

Its tokens are the demo model's, and random pairs of those and of each other. As byte pairs of real text do, they keep
letters and signs apart: one token of 25 is of signs, the others are of letters, perhaps behind a space.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import shutil
from typing import Any, Final

from quire.bench.shape import shape_options

DEMO: Final = pathlib.Path(__file__).parents[1] / "quire" / "_models" / "demo"
MOST_CHARS: Final = 16
SIGNS_SHARE: Final = 0.04
SPACE: Final = "\u0120"
"""As spelt in tokenizer.json."""
LETTERS: Final = re.compile(f"{SPACE}?[a-zA-Z]+")
SIGNS: Final = re.compile(f"{SPACE}?[!-/:-@\\[-`{{-~]+")
SPARE_IDS: Final = 300
"""Logits beyond the vocabulary, as most models have them."""


class _Kind:
    """Tokens that may be joined."""

    def __init__(self, tokens: set[str], pattern: re.Pattern[str]) -> None:
        self._left = [one for one in sorted(tokens) if pattern.fullmatch(one)]
        self._right = [one for one in self._left if not one.startswith(SPACE)]

    def pair(self, rng: random.Random, taken: set[str]) -> tuple[str, str]:
        """Two whose joint is new, which is added to both sets."""
        while True:
            left, right = rng.choice(self._left), rng.choice(self._right)
            joint = left + right
            if len(joint) <= MOST_CHARS and joint not in taken:
                taken.add(joint)
                self._left.append(joint)
                if not joint.startswith(SPACE):
                    self._right.append(joint)
                return left, right


def tokenizer_of(n_tokens: int, seed: int = 0) -> dict[str, Any]:
    """tokenizer.json of byte pairs with so many tokens."""
    found: dict[str, Any] = json.loads((DEMO / "tokenizer.json").read_text())
    model, rng = found["model"], random.Random(seed)
    vocab: dict[str, int] = model["vocab"]
    merges: list[list[str]] = model["merges"]
    taken = set(vocab) | {one["content"] for one in found["added_tokens"]}
    kinds = [_Kind(taken, LETTERS), _Kind(taken, SIGNS)]
    for token_id in range(len(taken), n_tokens):
        kind = kinds[rng.random() < SIGNS_SHARE]
        left, right = kind.pair(rng, taken)
        vocab[left + right] = token_id
        merges.append([left, right])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    source = pathlib.Path(str(shape_options(options.model)["model"]))
    options.folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    (options.folder / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_of(config["vocab_size"] - SPARE_IDS)
    (options.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO / name, options.folder / name)


if __name__ == "__main__":
    main()
