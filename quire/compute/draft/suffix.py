"""Suffix drafts (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975; vLLM's method "suffix").

What followed the longest ending that stood before, in the sequence or in earlier outputs. Owns a tree for each sequence
and one for the outputs of each salt, and their limit of memory; owns no verification. Nothing of one salt is seen by
another, in tokens or in what is guessed; of the memory alone all have a share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from quire.compute.draft.drafter import Guess, straightest
from quire.compute.draft.suffix_growth import BranchingSuffixTree
from quire.compute.draft.suffix_tree import Place, most_bytes

TAKEN_AT_ONCE = 2_048
"""Tokens that one guess takes into a tree. While a long prompt is taken, its sequence has no guess, and the steps of
the others wait no longer than some milliseconds."""
OWN_TOKENS = 8_192
"""Tokens of a prompt, its last ones, that a sequence's tree begins with: 3 to 4 MB."""
SALT_BYTES = 512
"""Of a salt with a tree: its entry, and its text below."""


class _Sequence:
    """What is known of the sequence in a slot. `seen`: its tokens' bytes, to notice another sequence under its name."""

    __slots__ = ("change", "n_left_out", "n_moved", "n_prompt", "place", "salt", "seen", "tree")

    def __init__(self, salt: str, n_prompt: int, depth: int) -> None:
        self.salt, self.n_prompt = salt, n_prompt
        self.n_left_out = max(0, n_prompt - OWN_TOKENS)
        self.start(depth)

    def start(self, depth: int) -> None:
        self.seen = bytearray()
        self.tree = BranchingSuffixTree(depth)
        self.place, self.n_moved, self.change = Place(), 0, -1
        """A place in the tree of outputs; up to which token, and which change of that tree, it is right."""


class _Outputs:
    """The earlier outputs of one salt. `change`: grows with each change of any such tree, so that no two are equal."""

    __slots__ = ("change", "tree")

    def __init__(self, depth: int) -> None:
        self.tree = BranchingSuffixTree(depth)
        self.change = 0


class SuffixDrafter:
    """A guess is the longest ending's most frequent continuation, of the sequence or of the outputs of its salt,
    whichever has the larger sum of probabilities.

    `max_tree_depth`: tokens, the longest ending that is looked for. `max_spec_factor`: tokens that are guessed for each
    of the ending. `min_token_prob`: the least probability of a token with all before it. `max_bytes`: of the trees of
    outputs together; the oldest outputs make room. Trees of sequences come on top, and end with them: some 350 bytes a
    token, 500 at most.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_bytes: int = 64 << 20,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self._depth, self._max_bytes = max_tree_depth, max_bytes
        self._factor, self._least = max_spec_factor, min_token_prob
        self._sequences: dict[int, _Sequence] = {}
        self._outputs: dict[str, _Outputs] = {}
        self._order: deque[str] = deque()
        """The salts of all outputs that are kept, in the order in which the outputs ended."""
        self._n_bytes = 0
        """An estimate from above of the memory of all trees of outputs."""
        self._n_changes = 0

    def open(self, slot: int, salt: str, n_prompt: int) -> None:
        """Another sequence is in `slot`, of whose tokens the first n_prompt are the prompt. It sees outputs of `salt`
        alone."""
        self._sequences[slot] = _Sequence(salt, n_prompt, self._depth)

    def guess(self, slot: int, tokens: np.ndarray, n: int) -> list[int]:
        """See `Drafter`; the slot is open. Amortised O(max_tree_depth) a token that is new since the last guess.

        Tokens that do not begin with those of the last guess are a caller's fault, and cost time: the tree of the
        sequence is begun again. An ending as long as max_tree_depth counts with all of the tokens since then.
        """
        ways = [tree.follow(place, text, n, self._least) for tree, place, text, n in self._trees_at(slot, tokens, n)]
        return max(ways, key=lambda way: way[1], default=([], 0.0))[0]

    def branch(self, slot: int, tokens: np.ndarray, n: int, most_children: int) -> Guess:
        """As `guess`, with up to `most_children` ways on from each place, the likeliest nodes of all."""
        grown = [
            tree.branch(place, text, n, self._least, most_children)
            for tree, place, text, n in self._trees_at(slot, tokens, n)
        ]
        best = max(grown, key=lambda tree: tree[2], default=([], [], 0.0))
        return straightest(*best[:2])

    def close(self, slot: int, tokens: np.ndarray) -> None:
        """The sequence leaves; what it put out, tokens[n_prompt:], is kept for the others of its salt.

        An output that cannot fit max_bytes alone is not kept.
        """
        sequence = self._sequences.pop(slot)
        output: list[int] = tokens[sequence.n_prompt :].tolist()
        needed = most_bytes(len(output)) + BranchingSuffixTree(self._depth).n_bytes + _salt_bytes(sequence.salt)
        if not output or needed > self._max_bytes:
            return
        while self._n_bytes + needed > self._max_bytes:
            self._remove_oldest()
        outputs = self._outputs.get(sequence.salt)
        if outputs is None:
            self._outputs[sequence.salt] = outputs = _Outputs(self._depth)
            self._n_bytes += outputs.tree.n_bytes + _salt_bytes(sequence.salt)
        before = outputs.tree.n_bytes
        outputs.tree.extend(output)
        outputs.tree.end()
        self._order.append(sequence.salt)
        self._changed(outputs, before)

    def _take(self, sequence: _Sequence, tokens: np.ndarray) -> None:
        """The sequence's tree takes the tokens that are new; all of them when those that it has are others."""
        n_known = len(sequence.tree.tokens)
        if n_known > len(tokens) or sequence.seen != tokens[:n_known].data:
            sequence.start(self._depth)
            n_known = 0
        new = tokens[n_known : n_known + TAKEN_AT_ONCE]
        if len(new):
            sequence.seen += new.data
            sequence.tree.extend(new.tolist())

    def _trees_at(
        self, slot: int, tokens: np.ndarray, n: int
    ) -> Iterator[tuple[BranchingSuffixTree, Place, list[int], int]]:
        """The trees in which some ending of these tokens stood before, where, the text, and how much may be guessed."""
        sequence = self._sequences[slot]
        tokens = tokens[sequence.n_left_out :]
        self._take(sequence, np.ascontiguousarray(tokens, dtype=np.int32))
        text, outputs = sequence.tree.tokens, self._outputs.get(sequence.salt)
        _move(sequence, outputs, self._depth)
        if len(text) < len(tokens):
            return
        places = [(sequence.tree, sequence.tree.place)]
        if outputs is not None:
            places.append((outputs.tree, sequence.place))
        for tree, place in places:
            most = min(n, int(self._factor * (place.length + place.lasted)))
            if most > 0 and place.length:
                yield tree, place, text, most

    def _remove_oldest(self) -> None:
        salt = self._order.popleft()
        outputs = self._outputs[salt]
        before = outputs.tree.n_bytes
        if outputs.tree.n_texts == 1:
            del self._outputs[salt]
            self._n_bytes -= before + _salt_bytes(salt)
            return
        outputs.tree.remove_oldest()
        self._changed(outputs, before)

    def _changed(self, outputs: _Outputs, n_bytes_before: int) -> None:
        self._n_bytes += outputs.tree.n_bytes - n_bytes_before
        self._n_changes += 1
        outputs.change = self._n_changes


def _move(sequence: _Sequence, outputs: _Outputs | None, depth: int) -> None:
    """The sequence's place in the tree of outputs follows its tokens; in a tree that changed it is looked for anew.

    An ending that fills the depth before and after the change has lasted as long as before.
    """
    text, n_moved = sequence.tree.tokens, sequence.n_moved
    sequence.n_moved = len(text)
    if outputs is None:
        return
    if sequence.change != outputs.change:
        lasted, sequence.place = sequence.place.lasted, Place()
        outputs.tree.move(sequence.place, text, max(0, n_moved - depth), n_moved)
        if sequence.place.length == depth:
            sequence.place.lasted = lasted
        sequence.change = outputs.change
    outputs.tree.move(sequence.place, text, n_moved, len(text))


def _salt_bytes(salt: str) -> int:
    return SALT_BYTES + 4 * len(salt)
