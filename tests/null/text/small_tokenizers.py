"""Small tokenizers of the kinds that checkpoints have."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = ["hello world, the quick brown fox\n", "def f(x):\n    return x + 1\n", "é ü 日本語 😀 ", "User: hi\nBot: "]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as Llama 3 and Qwen have it, with added tokens of all sorts."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT * 20, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool>", "<té>", "a b", "日")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback(strip: bool = True) -> tokenizers.Tokenizer:
    """BPE over characters with bytes for unknown ones, as Llama 2 and Mistral have it."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", *"abcdehlorwé", "he", "▁he"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab, [("h", "e"), ("▁", "he")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that looks at neighbours."""
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "##ed": 3, "now": 4, "é": 5, "##s": 6, "then": 7}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer
