"""Regular expressions of others: what `re` says of them, and no time lost with those that keep it busy for ever."""

from __future__ import annotations

import random
import re

import pytest

from quire.config.pattern import MAX_CHARS, Pattern, PatternError

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 7, 12)
    for module in ("self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.down_proj", "block_sparse_moe.experts.11.w2", "")
] + ["lm_head", "model.embed_tokens", "a\nb", "ab" * 40, "]-x", "{x", ""]
TARGETS = [
    ".*self_attn.*", r".*\.(q|k|v)_proj$", r"model\.layers\.[0-9]+\.mlp\.(gate|up)_proj", "^lm_head$",
    r".*\.\d{1,2}\.w[12]$", r"^(?!.*experts).*proj", r"(?=.*mlp)(?!.*gate).*", r".*layers\.(?:0|1[0-9])\..*", "", ".",
    "$", r"[^m].*", r"[]-]+x", r".*(mlp|self_attn)\.[^.]+_proj$", r"\w+\.\w+\.\d+", r"(ab){2,}$", r"(ab){3,5}?", "{x",
    r".*?experts\.\d+?\.", r"\S+\s\S", r"(a|ab)(c|bcd)?", r"(.*\.)?(q_proj)$",
    r"(.*\.)?(^model\..*q_proj)$", "(a*)*b", "(a|b|ab)*$", "[a-cx-z_]+", r"a.b",
]  # fmt: skip


@pytest.mark.parametrize("text", TARGETS)
def test_matches_what_re_matches(text: str) -> None:
    made = Pattern(text)
    assert [made.matches(name) for name in NAMES] == [re.match(text, name) is not None for name in NAMES]


def test_random_patterns() -> None:
    chance = random.Random(0)

    def part(depth: int) -> str:
        kind = chance.randrange(6 if depth else 3)
        if kind < 3:
            made = chance.choice(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\.", "a|b", "^a", "b$"])
        elif kind == 3:
            made = f"({part(depth - 1)}|{part(depth - 1)})" + chance.choice(["", "*", "+", "?", "{2}", "{0,2}", "{1,}"])
        else:
            made = part(depth - 1) + part(depth - 1)
        return made

    n_matched = 0
    for _ in range(1500):
        text = part(4)
        word = "".join(chance.choices("ab.c", k=chance.randrange(8)))
        found = re.match(text, word) is not None
        assert Pattern(text).matches(word) == found, (text, word)
        n_matched += found
    assert 300 < n_matched < 1200


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(a|a)*b", "(.*a){20}b", ".*.*.*.*.*.*.*.*b$", "(?!(a+)+c)(a+)+b", "(a?){60}a{60}b"]
)
def test_no_pattern_takes_long(text: str) -> None:
    """`re` would not come back from any of these."""
    assert not Pattern(text).matches("a" * 2000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"(a)\1", r"\\1 is not read"), ("(?i)a", r"\(\?i is not read"), (r"a\b", r"\\b is not read"),
        ("a(?=b)", r"\(\?= is not read: lookaheads"), ("(?<!a)b", r"\(\?< is not read"),
        ("(", "ends too early"), ("a)", r"a \) too many"),
        ("[a", "ends too early"), ("*a", r"nothing stands before \*"), ("a**", "repetition of a repetition"),
        ("a{3,2}", "is no range"), ("a" * (MAX_CHARS + 1), "1,025 characters, at most 1,024"), ("\\", "ends too early"),
        ("(" * 40 + ")" * 40, "more than 32 deep"), ("(a{900}){900}", "more than 1,024 places"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_said(text: str, said: str) -> None:
    with pytest.raises(PatternError, match=said):
        Pattern(text)


def test_what_is_empty_is_not_repeated() -> None:
    """Or a few characters would take for ever to read."""
    assert Pattern("(((){9999}){9999}){9999}a").matches("a")
    assert Pattern("(a{0}){9999}b").matches("b")
