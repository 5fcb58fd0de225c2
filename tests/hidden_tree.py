"""Trees of drafts for tests of those who verify them: the truth is hidden in a random branch."""

from __future__ import annotations

import random

from quire.compute.draft.drafter import DraftTree


def hidden_tree(
    whole: list[int], n_known: int, n: int, chance: float, rng: random.Random, vocab: int, likely: float = 0.0
) -> DraftTree:
    """n nodes behind the first n_known tokens of a text: one that goes on with the text has a true child among its
    children with a chance. likely: the share of the others that are tokens which the text goes on with somewhere."""
    tokens, parents, depths, is_true = list[int](), list[int](), list[int](), list[bool]()
    while len(tokens) < n:
        parent = rng.choice([-1, *range(len(tokens))]) if tokens else -1
        at = n_known + (depths[parent] if parent >= 0 else 0)
        goes_on = (parent < 0 or is_true[parent]) and at < len(whole)
        taken = {tokens[node] for node, above in enumerate(parents) if above == parent}
        if goes_on and whole[at] not in taken and rng.random() < chance:
            token = whole[at]
        else:
            truth = {whole[at]} if at < len(whole) else set()
            others = set(range(vocab)) - taken - (truth if goes_on else set())
            if likely and rng.random() < likely:
                others = others & set(whole[n_known:]) or others
            token = rng.choice(sorted(others))
        tokens.append(token)
        parents.append(parent)
        depths.append(at + 1 - n_known)
        is_true.append(goes_on and token == whole[at])
    return DraftTree(tokens, parents)
