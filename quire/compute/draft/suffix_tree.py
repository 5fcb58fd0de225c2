"""`SuffixTree`: how often each string of a few tokens stands in some texts, and what follows it.

Built as tokens arrive (Ukkonen 1995, "On-line construction of suffix trees"), and cut at a depth (Na et al. 2003,
"Truncated suffix trees"). Owns the tokens and the counts; owns no choice of how far to guess, and no limit of memory.
Invariants: an inner node has two children or more, and a suffix link. `_position` of a node is the newest window that
passes it, so that a label is never in a text that was taken out. Nodes are numbers: no cycle for the collector.
"""

from __future__ import annotations

from collections import deque

END = -1
"""Follows the last token of a text that ended. No token id is negative."""
ROOT = 0
_ENDLESS = 1 << 62
"""The root's count. As the best child, the root means "not known": no child's count reaches it."""
_NO_CHILDREN: dict[int, int] = {}
"""Of every leaf. Never written to."""

TREE_BYTES = 4_096
TEXT_BYTES = 256
TOKEN_BYTES = 42
NODE_BYTES = 224
FREE_NODE_BYTES = 136
"""Of a tree, a text, a token, a node, leaf or not, and a row of a node that is gone: the largest shares that were
measured (docs/lab-notes.md)."""


def most_bytes(n_tokens: int) -> int:
    """What a text of n tokens, its end not counted, can at most add to `SuffixTree.n_bytes`."""
    return TEXT_BYTES + (n_tokens + 1) * (TOKEN_BYTES + 2 * NODE_BYTES)


class Place:
    """Where a text's longest known ending stands in a tree: `length` tokens, on the edge below `node` or at it.

    `lasted`: how many tokens more the ending grew by, while `length` could not as it was the tree's depth.
    """

    __slots__ = ("lasted", "length", "node")

    def __init__(self) -> None:
        self.node, self.length, self.lasted = ROOT, 0, 0


class SuffixTree:
    """Counts of all strings of up to `depth` + 1 tokens, so that what follows `depth` tokens is known.

    A string that runs up to the end of a text still open is not counted there: what follows is not known yet.
    `place`: the longest ending, of up to `depth` tokens, of the open text that stands in the tree before.
    """

    def __init__(self, depth: int) -> None:
        self._window = depth + 1
        self.place = Place()
        self.tokens: list[int] = []
        """Of the texts that ended, each with its END, and of the open one. Not to be changed."""
        self._base = 0
        """Position of the first token that is still there. Positions count from the first that ever was."""
        self._begin = 0
        """Where the open text begins."""
        self._texts: deque[int] = deque()
        """Lengths of the texts that ended, each with its END."""
        self._count = [_ENDLESS]
        self._position = [0]
        self._depth = [0]
        self._parent = [ROOT]
        self._link = [ROOT]
        self._best = [ROOT]
        self._children: list[dict[int, int]] = [{}]
        self._free: list[int] = []

    @property
    def n_texts(self) -> int:
        """Texts that ended and are still there."""
        return len(self._texts)

    @property
    def n_nodes(self) -> int:
        """Nodes in use, the root among them."""
        return len(self._count) - len(self._free)

    @property
    def n_bytes(self) -> int:
        """An estimate from above of the memory that is held. Lists of nodes do not shrink: their rows count."""
        return (
            TREE_BYTES
            + TEXT_BYTES * len(self._texts)
            + TOKEN_BYTES * len(self.tokens)
            + NODE_BYTES * self.n_nodes
            + FREE_NODE_BYTES * len(self._free)
        )

    def extend(self, tokens: list[int]) -> None:
        """The open text goes on by `tokens`. Amortised O(depth) a token, most often O(1)."""
        text, base, window = self.tokens, self._base, self._window
        children, depths, positions, link = self._children, self._depth, self._position, self._link
        place = self.place
        node, length, lasted = place.node, place.length, place.lasted
        for token in tokens:
            end = base + len(text)
            text.append(token)
            unlinked = ROOT
            while True:
                # text[end - length : end] ends below `node`; does `token` follow there?
                below = children[node]
                if length == depths[node]:
                    child = below.get(token, ROOT)
                    found, at = child != ROOT, node
                else:
                    child = below[text[end - length + depths[node] - base]]
                    found, at = text[positions[child] + length - base] == token, ROOT
                if unlinked and at:
                    link[unlinked], unlinked = at, ROOT
                if found:
                    length += 1
                    break
                if length != depths[node]:
                    at = self._split(node, child, length)
                    if unlinked:
                        link[unlinked] = at
                    unlinked = at
                self._add_leaf(at, token, end - length)
                if not length:
                    break
                length -= 1
                node = self._below(link[node], text, end - length - base, length)
            if length == window:
                self._add_window(child, end + 1 - length)
                lasted += 1
                length -= 1
                node = self._below(link[node], text, end + 1 - length - base, length)
            else:
                lasted = 0
                if length and length == depths[child]:
                    node = child
        place.node, place.length, place.lasted = node, length, lasted

    def end(self) -> None:
        """The open text ends here; another one is open then, which is empty."""
        self.extend([END])
        text, place, end = self.tokens, self.place, self._base + len(self.tokens)
        while place.length:
            # All endings that stood here before end in a leaf: nothing follows END.
            first = end - place.length - self._base
            below = self._children[place.node]
            self._add_window(below[text[first + self._depth[place.node]]], end - place.length)
            place.length -= 1
            place.node = self._below(self._link[place.node], text, first + 1, place.length)
        self.place = Place()
        self._texts.append(end - self._begin)
        self._begin = end

    def remove_oldest(self) -> None:
        """Takes out the text that ended first, of which there must be one. No text may be open.

        Longer endings go before shorter ones, so that a suffix link never leads to a node that is gone.
        """
        n = self._texts.popleft()
        for start in range(self._base, self._base + n):
            self._remove_window(start)
        del self.tokens[:n]
        self._base += n

    def move(self, place: Place, text: list[int], start: int, end: int) -> None:
        """`place`, of the longest ending of text[:start] that stands in this tree, becomes that of text[:end]. `text`
        is not the tree's own. O(1) a token, amortised."""
        own, base, window = self.tokens, self._base, self._window
        children, depths, positions, link = self._children, self._depth, self._position, self._link
        node, length, lasted = place.node, place.length, place.lasted
        for i in range(start, end):
            token = text[i]
            while True:
                below = children[node]
                if length == depths[node]:
                    child = below.get(token, ROOT)
                    found = child != ROOT
                else:
                    child = below[text[i - length + depths[node]]]
                    found = own[positions[child] + length - base] == token
                if found:
                    length += 1
                    break
                if not length:
                    break
                length -= 1
                node = self._below(link[node], text, i - length, length)
            if length == window:
                lasted += 1
                length -= 1
                node = self._below(link[node], text, i + 1 - length, length)
            else:
                lasted = 0
                if length and length == depths[child]:
                    node = child
        place.node, place.length, place.lasted = node, length, lasted

    def follow(self, place: Place, text: list[int], n: int, least: float) -> tuple[list[int], float]:
        """Up to n tokens, each the most frequent one after the last `depth` tokens before it, from `place`, the last
        `place.length` tokens of `text`, at least one; and the sum of their probabilities.

        A probability is the share of a string's occurrences that go on so, times that of the token before. Where it is
        under `least`, or a text ended, the tokens end. Of equally frequent ones the one that was seen last is taken.
        """
        own, base, depths, positions = self.tokens, self._base, self._depth, self._position
        node, length = place.node, place.length
        child = self._edge(node, text, len(text) - length, length)
        tokens: list[int] = []
        probability, total = 1.0, 0.0
        while True:
            if length == depths[node]:
                child = self._best[node] or self._find_best(node)
                probability *= self._count[child] / self._count[node]
                if probability < least:
                    break
            # What is left of an edge has one way to go on.
            first = positions[child] + length - base
            n_wanted = min(depths[child] - length, n - len(tokens))
            piece = own[first : first + n_wanted]
            if END in piece:
                piece = piece[: piece.index(END)]
            tokens += piece
            total += probability * len(piece)
            length += len(piece)
            if len(piece) < n_wanted or len(tokens) == n:
                break
            if self._children[child]:
                node = child
            else:
                # As deep as the tree is: the first token is forgotten.
                length -= 1
                first = positions[child] + 1 - base
                node = self._below(self._link[node], own, first, length)
                child = self._edge(node, own, first, length)
        return tokens, total

    def _below(self, node: int, text: list[int], first: int, length: int) -> int:
        """The lowest node at or above the string text[first : first + length], which is in the tree, from a node of
        it downwards."""
        children, depths = self._children, self._depth
        depth = depths[node]
        while depth < length:
            below = children[node]
            child = below[text[first + depth]]
            depth = depths[child]
            if depth > length:
                break
            node = child
        return node

    def _edge(self, node: int, text: list[int], first: int, length: int) -> int:
        """The child of `node` on whose edge text[first : first + length] ends; the root where it ends at the node."""
        below, depth = self._children[node], self._depth[node]
        return below[text[first + depth]] if depth < length else ROOT

    def _find_best(self, node: int) -> int:
        count, position, below = self._count, self._position, self._children[node]
        self._best[node] = best = max(below.values(), key=lambda child: (count[child], position[child]))
        return best

    def _add_window(self, node: int, start: int) -> None:
        """One more window, the newest, passes `node` and all above it. O(nodes above)."""
        count, position, parents, best = self._count, self._position, self._parent, self._best
        while node:
            count[node] = n = count[node] + 1
            position[node] = start
            parent = parents[node]
            if n >= count[best[parent]]:
                best[parent] = node
            node = parent

    def _new_node(self, position: int, depth: int, parent: int) -> int:
        if self._free:
            node = self._free.pop()
            self._position[node], self._depth[node], self._parent[node] = position, depth, parent
            self._count[node], self._link[node], self._best[node] = 0, ROOT, ROOT
            return node
        node = len(self._count)
        self._count.append(0)
        self._position.append(position)
        self._depth.append(depth)
        self._parent.append(parent)
        self._link.append(ROOT)
        self._best.append(ROOT)
        self._children.append(_NO_CHILDREN)
        return node

    def _add_leaf(self, parent: int, token: int, start: int) -> None:
        leaf = self._new_node(start, self._window, parent)
        below = self._children[parent]
        below[token] = leaf
        self._add_window(leaf, start)

    def _split(self, node: int, child: int, length: int) -> int:
        """A node in the edge from `node` to `child`, for the first `length` tokens. It has no link yet.

        Where `child` was the best of `node`, the leaf that comes next below the middle makes that the best.
        """
        position = self._position[child]
        first = position - self._base
        middle = self._new_node(position, length, node)
        below = self._children[node]
        below[self.tokens[first + self._depth[node]]] = middle
        self._children[middle] = {self.tokens[first + length]: child}
        self._parent[child] = middle
        self._count[middle], self._best[middle] = self._count[child], child
        return middle

    def _remove_window(self, start: int) -> None:
        """The oldest window goes. A leaf that no other passes goes with it, and a node with one child left."""
        text, first = self.tokens, start - self._base
        node, below = ROOT, self._children[ROOT]
        while below:
            parent, token = node, text[first + self._depth[node]]
            node = below[token]
            self._count[node] -= 1
            if self._best[parent] == node:
                self._best[parent] = ROOT
            siblings, below = below, self._children[node]
        if self._count[node]:
            return
        del siblings[token]
        self._free.append(node)
        if parent and len(siblings) == 1:
            self._merge(parent)

    def _merge(self, node: int) -> None:
        """The only child takes the place of an inner node, which lost a window and so is no one's best."""
        parent, only = self._parent[node], self._children[node]
        above = self._children[parent]
        child = next(iter(only.values()))
        above[self.tokens[self._position[child] + self._depth[parent] - self._base]] = child
        self._parent[child] = parent
        self._children[node] = _NO_CHILDREN
        self._free.append(node)
