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


CONTROLS = """<s> </s> <|im_start|> <|im_end|> <|end|> <|user|> <|system|> <|assistant|> <|tool|> <|start_header_id|>
    <|end_header_id|> <|eot_id|> [INST] [/INST] <｜User｜>""".split()  # noqa: SIM905
SOFT = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <|fim|>".split()  # noqa: SIM905


def marked(tokenizer: tokenizers.Tokenizer, **flags: bool) -> tokenizers.Tokenizer:
    """With the marks of all chat templates of these tests. Those at the ends only look like control tokens."""
    flags = {"normalized": False} | flags
    tokenizer.add_special_tokens([AddedToken(text, **flags) for text in CONTROLS[:-1]])
    tokenizer.add_tokens([AddedToken(text, special=False, **flags) for text in (CONTROLS[-1], *SOFT)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<b>", "\n\n", "  ")])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Whose own model finds the control tokens of its vocabulary, and writes unknown characters as one."""
    letters = [*"abcdefghijklmnopqrstuvwxyz<>/|[]_INST\n", "▁", "tool", "call"]
    scores = {text: -5.0 - i / 50 for i, text in enumerate(letters)}
    vocab = [("<unk>", 0.0), *[(text, 0.0) for text in CONTROLS[:4]], *scores.items()]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<unk>"])
    return marked(tokenizer)


def words() -> tokenizers.Tokenizer:
    """Whole words, control tokens among them."""
    vocab = {word: i for i, word in enumerate(["?", *CONTROLS[:6], "user", "assistant", "hi", "<", ">", "|"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return marked(tokenizer)


def merged() -> tokenizers.Tokenizer:
    """BPE whose merges lead to a control token, with a hole in its ids."""
    pieces = [*map(chr, range(32, 127)), "\n", "</", "s>", "<s", "<unk>", *CONTROLS, *SOFT, "<b>", "\n\n", "  "]
    vocab = {piece: i + 5 * (i > 90) for i, piece in enumerate(pieces)}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("<", "s"), ("<s", ">")]
    return marked(tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>")))


def with_normalizer() -> tokenizers.Tokenizer:
    """Byte-level BPE that finds marks in normalised text, also those in wide characters."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    return marked(tokenizer, normalized=True)


def stripping() -> tokenizers.Tokenizer:
    """Marks that swallow the white space around them, and some that must stand alone."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", single_word=True, normalized=False)])
    return marked(tokenizer)


ALL_KINDS = {
    "byte_level": lambda: marked(byte_level()), "byte_fallback": lambda: marked(byte_fallback()),
    "byte_fallback_normalized": lambda: marked(byte_fallback(), normalized=True),
    "word_piece": lambda: marked(word_piece()),
    "unigram": unigram, "words": words, "merged": merged, "with_normalizer": with_normalizer, "stripping": stripping,
}  # fmt: skip
