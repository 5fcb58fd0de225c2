"""What a decoder leaves behind in the KV cache: which layers store alike, and how their pages lie in one pool.

Owns the grouping of layers and the counting of pages over groups. Does not own page ids (`control`), bytes a number
(`planner/memory`) nor tensors (`compute`). Torch-free.
Layers that keep keys equally long make groups of equally many layers. A page holds `page_size` tokens of the layers of
one group, one layer a *lane*; so all pages have the same bytes, and one pool serves every group.
Invariants: each layer that keeps keys is in one group, another in none; groups that keep everything come first; one
kind of layer is one group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from quire.config.arch import ModelArch
from quire.config.layers import KVSpec
from quire.core.errors import ConfigError

MOST_WASTE: Final = 0.15
"""Share of lanes that may stay empty, over all groups: what a sequence shorter than every window pays."""
MOST_GROUPS: Final = 16
"""Each group costs an entry of a page table in every 16th step of a sequence."""
ENDLESS: Final = 1 << 40
"""Tokens: more than anybody computes."""


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share a page table; layer `layers[i]` has lane i of its pages."""

    spec: KVSpec
    layers: tuple[int, ...]


class KVLayout(msgspec.Struct, frozen=True):
    """All groups of a model. A group may have fewer layers than a page has lanes: the others stay empty."""

    groups: tuple[KVGroup, ...]
    n_lanes: int
    """Layers a page."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each group, see `KVSpec.window`."""
        return tuple(group.spec.window for group in self.groups)

    @property
    def n_full(self) -> int:
        """Groups that keep everything: the first ones."""
        return self.windows.count(0)

    @property
    def numbers(self) -> int:
        """Numbers that a token takes in a page, those of empty lanes counted in."""
        return self.n_lanes * self.groups[0].spec.numbers

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """(group, lane) of each layer that keeps keys, in their order."""
        found = {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}
        return dict(sorted(found.items()))

    def pages_of(self, n_tokens: int, page_size: int, in_flight: int) -> list[int]:
        """Pages that each group needs at once for a sequence of `n_tokens` that goes on alone to its end.

        Of a window: what the first token of the page being computed sees behind it, that page, and what is in flight.
        in_flight: tokens whose step may not have ended when the next is planned. A prompt has as many of them as the
        chunks in flight; its chunks are cut to the pages that are left.
        """
        n_pages = -(-n_tokens // page_size)
        ahead = -(-(in_flight - 1) // page_size)
        return [
            min(n_pages, -(-(window - 1) // page_size) + ahead + 1) if window else n_pages for window in self.windows
        ]

    def seq_pages(self, n_tokens: int, page_size: int, in_flight: int) -> int:
        """The sum of `pages_of`."""
        return sum(self.pages_of(n_tokens, page_size, in_flight))

    def tokens_within(self, n_pages: int, page_size: int, in_flight: int) -> int:
        """The inverse: most tokens, in whole pages, whose `seq_pages` are at most `n_pages`; at most `ENDLESS`."""
        low, high = 0, ENDLESS // page_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.seq_pages(middle * page_size, page_size, in_flight) <= n_pages:
                low = middle
            else:
                high = middle - 1
        return low * page_size


def tokens_in_flight(pipeline_depth: int, n_drafts: int = 0) -> int:
    """Most tokens of a decoding sequence whose steps may not have ended when the next is planned, that one's too.

    n_drafts: most of a span.
    """
    return pipeline_depth * (1 + n_drafts)


def first_page(window: int, n_tokens: int, page_size: int) -> int:
    """The first page that token number `n_tokens` of a sequence (from 0) or a later one sees in a group."""
    return max(0, n_tokens - window + 1) // page_size if window else 0


def one_group(spec: KVSpec, n_layers: int) -> KVLayout:
    """All layers in one group."""
    return KVLayout((KVGroup(spec, tuple(range(n_layers))),), n_layers)


PLAIN: Final = one_group(KVSpec(1, 1), 1)
"""Stands for any model of which every layer keeps everything."""


@functools.lru_cache(maxsize=64)
def kv_layout(arch: ModelArch, max_model_len: int = 0, *, hybrid: bool = True) -> KVLayout:
    """The groups of a model. max_model_len: windows that reach over it never give a page back, and count as none.

    hybrid False: one group that keeps everything. Where no layer keeps keys, one group without layers: its pages hold
    nothing, and say which tokens were seen. The lanes are chosen so that layers that keep everything take the
    fewest, then for the fewest groups, within `MOST_WASTE` and `MOST_GROUPS`. Example: Gemma 3 with 22 windows and 4
    full layers has pages of 4 lanes, one full group and six of windows, the last of which has 2 layers: 2 of 28 lanes
    are empty. Where nothing is within the limits there is one group. ConfigError where layers store other numbers.
    """
    _check_alike(arch.kv_specs)
    longest = max_model_len or ENDLESS
    specs = {
        layer: spec if hybrid and spec.window < longest else msgspec.structs.replace(spec, window=0)
        for layer, spec in arch.kv_specs.items()
    }
    layers = {spec: [layer for layer, own in specs.items() if own == spec] for spec in specs.values()}
    if not layers:
        return KVLayout((KVGroup(KVSpec(1, 1), ()),), 0)
    if len(layers) == 1:
        return KVLayout(tuple(KVGroup(spec, tuple(own)) for spec, own in layers.items()), len(specs))
    n_lanes = _lanes({spec: len(own) for spec, own in layers.items()})
    if n_lanes is None:
        return kv_layout(arch, hybrid=False)
    groups = [KVGroup(spec, part) for spec, own in layers.items() for part in _parts(own, n_lanes)]
    return KVLayout(tuple(sorted(groups, key=lambda group: (group.spec.window > 0, group.layers))), n_lanes)


def _check_alike(specs: Mapping[int, KVSpec]) -> None:
    """A page serves any group, so a token must leave the same in a lane of each."""
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in specs.items():
        layers.setdefault(msgspec.structs.replace(spec, window=0), []).append(layer)
    if len(layers) > 1:
        kinds = "; ".join([
            f"{spec.n_kv_heads} KV heads of {spec.head_dim} ({spec.numbers} numbers a token) in layers "
            f"{', '.join(map(str, own[:8]))}{' ...' if len(own) > 8 else ''}"
            for spec, own in layers.items()
        ])  # fmt: skip
        raise ConfigError(f"layers leave different keys and values: {kinds}; pages of the KV cache hold one kind only")


def _lanes(counts: dict[KVSpec, int]) -> int | None:
    """Lanes of a page for so many layers of each kind, or None."""
    n_layers = sum(counts.values())
    best: tuple[int, int, int] | None = None
    for n in range(1, max(counts.values()) + 1):
        n_groups = {spec: -(-count // n) for spec, count in counts.items()}
        total = sum(n_groups.values())
        if total > MOST_GROUPS or total * n - n_layers > MOST_WASTE * n_layers:
            continue
        n_kept = n * sum(groups for spec, groups in n_groups.items() if not spec.window)
        best = min(best or (n_kept, total, n), (n_kept, total, n))
    return best[2] if best else None


def _parts(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
