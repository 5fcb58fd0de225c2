"""Texts for `quire quantize` and `quire bench tradeoffs` of the demo model, from its corpus.

    python -m benchmarks.held_out_texts FOLDER

Writes code.txt, tests.txt and docs.txt of held-out documents, and calibration.txt of documents that it was trained on.
"""

from __future__ import annotations

import argparse
import pathlib

from demo import corpus

KINDS = ("code", "tests", "docs")


def text_of(documents: list[corpus.Document], n_bytes: int) -> str:
    """The beginnings of documents, alike, of n_bytes in all."""
    most = 8_000
    parts = [document.text[:most] for document in documents]
    return "\n".join(parts)[:n_bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--bytes", type=int, default=100_000, help="of each held-out text")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    documents = corpus.load(None)
    for kind in KINDS:
        held_out = [one for one in documents if one.held_out and one.kind == kind]
        (args.folder / f"{kind}.txt").write_text(text_of(held_out, args.bytes))
    seen = [[one for one in documents if not one.held_out and one.kind == kind] for kind in KINDS]
    calibration = "\n".join(text_of(own, 3 * args.bytes) for own in seen)
    (args.folder / "calibration.txt").write_text(calibration)


if __name__ == "__main__":
    main()
