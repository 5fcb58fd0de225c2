"""Owns the tokenizer: byte-level BPE with single digits, learned from corpus and dialogues, saved for transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .chat import CHAT_TEMPLATE, END_OF_TEXT, MARKER_TOKENS, SPECIAL_TOKENS, TURN_END
from .corpus import Document
from .dialogues import conversations

VOCABULARY = 4096
MAX_LENGTH = 2048
# Words with at most one leading mark or space, single digits, runs of marks, line ends with the spaces before them.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn VOCABULARY tokens from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKER_TOKENS),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKER_TOKENS])
    return tokenizer


def training_texts(documents: list[Document], n_dialogues: int, corpus_bytes: int) -> Iterable[str]:
    """A sample of the training documents, and dialogues."""
    total = 0
    for document in sorted(documents, key=lambda d: d.kind == "tests"):
        if not document.held_out and total < corpus_bytes:
            total += len(document.text)
            yield document.text
    yield from conversations(random.Random(1).randrange(2**31), n_dialogues)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + MARKER_TOKENS
    }
    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL_TOKENS,
        "bos_token": None,
        **special,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({**special, "additional_special_tokens": SPECIAL_TOKENS}, indent=2) + "\n"
    )
