"""The invariants of control, recomputed from nothing after each operation."""

from __future__ import annotations

from quire.control.node import Node
from quire.control.scheduler import Scheduler
from quire.control.seq import Seq, SeqState
from quire.engine.executors.digests import NON_FINITE, ROW_BYTES, State
from quire.engine.executors.null import NullExecutor


def unended_seqs(scheduler: Scheduler) -> list[Seq]:
    """With all members of beam searches."""
    live = scheduler.live
    seqs = [seq for seqs in live.requests.values() for seq in seqs if seq.state is not SeqState.ENDED]
    return seqs + [member for search in live.searches.values() for member in search.members[1:]]


def tree_nodes(scheduler: Scheduler) -> list[Node]:
    tree = scheduler.live.cache.tree
    return [node for root in tree.roots.values() for node in tree.subtree(root) if node is not root]


def held_by(seq: Seq) -> list[int]:
    """The pages of all groups."""
    return [page for table in seq.tables for page in table if page]


def pages_of(node: Node) -> list[int]:
    return [page for table in node.tables for page in table if page]


def path_of(node: Node) -> list[Node]:
    """From the root down to the node."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def check_pages(scheduler: Scheduler) -> None:
    """A 1-8: every page has exactly the owners that its reference count says, and only those."""
    live, config = scheduler.live, scheduler.config
    pool = live.cache.pool
    owners = [0] * config.n_pages
    n_unheard = config.num_speculative_tokens * (config.pipeline_depth + 1)
    for seq in live.running:
        assert len(seq.tables) == len(config.kv.windows), "a sequence that runs has a table for each group"
        n_ahead = n_unheard if seq.search is None else 1  # a fork has the page for its next token
        most = config.pages_for(min(seq.planned + n_ahead, seq.limit))
        for table, window in zip(seq.tables, config.kv.windows, strict=True):
            assert config.pages_for(seq.planned) <= len(table) <= most, "a table is longer or shorter than planned"
            border = seq.computed - seq.computed % config.page_size
            assert [page > 0 for page in table] == [
                not window or (index + 1) * config.page_size > border - window + 1 for index in range(len(table))
            ], "a page that no token from the last border on sees is held, or one that a token sees is not"
        assert len(set(held_by(seq))) == len(held_by(seq))
        for page in held_by(seq):
            owners[page] += 1
    nodes = tree_nodes(scheduler)
    cached = [page for node in nodes for page in pages_of(node)]
    for page in cached:
        owners[page] += 1
    assert len(set(cached)) == len(cached), "a page is twice in the tree"
    assert owners[0] == 0 == pool.refs[0], "the dummy page has an owner"
    assert pool.refs == owners, "reference counts differ from owners"
    free = pool._free
    assert sorted(free) == [page for page in range(1, config.n_pages) if not owners[page]], "free list differs"
    n_full = config.kv.n_full
    held = {page for seq in live.running for page in held_by(seq)}
    unreferenced = {page for node in nodes for table in node.tables[n_full:] for page in table if page} - held
    assert unreferenced == set(live.cache.tree.window_pages.unreferenced), "pages of windows that may go are others"
    unlocked = [page for node in nodes if node.lock == 0 for table in node.tables[:n_full] for page in table]
    unlocked += unreferenced
    locked = [page for node in nodes if node.lock for table in node.tables[:n_full] for page in table]
    assert held.issuperset(locked), "a locked page nobody uses"
    assert len(free) + len(unlocked) + len(held) == config.n_usable_pages, "pages without a named owner"
    assert not held.intersection(unlocked), "an evictable page is in use"
    assert live.cache.n_available == len(free) + len(unlocked)
    if not live.running:
        assert live.cache.n_available == config.n_usable_pages, "a quiescent pool is not wholly available"


def check_tree(scheduler: Scheduler) -> None:
    """B 9-12, 15: exact keys, full pages, locks as sequences hold them, counters, bounded metadata, eviction order."""
    live, size = scheduler.live, scheduler.config.page_size
    tree, nodes = live.cache.tree, tree_nodes(scheduler)
    n_full = scheduler.config.kv.n_full
    assert tree.n_nodes == len(nodes) and tree.n_pages == sum(len(pages_of(node)) for node in nodes)
    assert tree.n_common == sum(node.lock > 1 for node in nodes), "shared prefixes are looked for by this count"
    assert tree.n_unlocked == n_full * sum(node.n_pages for node in nodes if node.lock == 0)
    places = {
        page: (node, group) for node in nodes for group, table in enumerate(node.tables) if group >= n_full
        for page in table if page
    }  # fmt: skip
    assert tree.window_pages.places == places, "a page of a window is not where the tree looks for it"
    ticks = list(tree.window_pages.unreferenced.values())
    assert ticks == sorted(ticks)
    assert all(root.children for root in tree.roots.values()), "an empty root stays"
    assert len(tree._order) <= 2 * len(nodes) + 65 + scheduler.config.n_pages, "the eviction order is not bounded"
    locks: dict[Node, int] = {}
    for seq in live.running:
        assert (seq.node is None) == (seq.n_tree_pages == 0)
        if seq.node is None:
            continue
        path = path_of(seq.node)
        tokens = [token for node in path for token in node.tokens]
        assert path[0].salt == seq.request.cache_salt, "a path of another salt"
        assert live.cache.tree.roots[path[0].salt] is path[0], "a path outside the tree"
        assert len(tokens) == seq.n_tree_pages * size and seq.tokens[: len(tokens)] == tokens, "a path of other tokens"
        for group, own in enumerate(seq.tables):
            pages = [page for node in path for page in node.tables[group]]
            agree = all(one in (0, other) for one, other in zip(own, pages, strict=False))
            assert agree and (group >= n_full or pages == own[: seq.n_tree_pages]), "a lock on pages of others"
        for node in path:
            locks[node] = locks.get(node, 0) + 1
    entries = {(stamp, id(node)) for stamp, _, node in tree._order._heap}
    for node in nodes:
        assert node.n_pages and {len(table) * size for table in node.tables} == {len(node.tokens)}, "partial pages"
        assert all(all(table) for table in node.tables[:n_full]), "a hole in what is kept"
        assert node.lock == locks.get(node, 0), "a lock without a holder, or a holder without a lock"
        assert node.parent is not None and node.parent.children[tree._page_key(node.tokens, 0)] is node
        if node.lock == 0 and not node.children:
            assert any(table[-1] for table in node.tables), "a leaf that ends without a page"
        if node.lock == 0 and not node.children and n_full:
            assert (node.stamp, id(node)) in entries, "an unlocked leaf that eviction cannot find"
        for child in node.children.values():
            assert child.lock <= node.lock and (node.lock or child.stamp <= node.stamp)


def cached_pages(scheduler: Scheduler, salt: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Of each cached prefix in whole pages, its last page in each group."""
    size, found = scheduler.config.page_size, {}
    for node in tree_nodes(scheduler):
        path = path_of(node)
        if path[0].salt == salt:
            tokens = tuple(token for inner in path for token in inner.tokens)
            for i, pages in enumerate(zip(*node.tables, strict=True)):
                found[tokens[: len(tokens) - (node.n_pages - 1 - i) * size]] = pages
    return found


def longest_hit(scheduler: Scheduler, salt: str, tokens: list[int]) -> list[tuple[int, ...]]:
    """The pages of each group of the longest prefix behind which the next token finds each key that it sees; by trying
    every length and looking at every key."""
    size, cached = scheduler.config.page_size, cached_pages(scheduler, salt)
    pages: list[tuple[int, ...]] = []
    best = 0
    while len(tokens) >= (len(pages) + 1) * size and (key := tuple(tokens[: (len(pages) + 1) * size])) in cached:
        pages.append(cached[key])
        end = len(pages) * size
        if all(
            pages[position // size][group]
            for group, window in enumerate(scheduler.config.kv.windows)
            for position in range(end)
            if not window or end - position < window
        ):
            best = len(pages)
    return pages[:best]


def check_hits(scheduler: Scheduler, prompts: list[tuple[str, list[int]]]) -> None:
    """B: a hit is the longest there is, has each page that the next token sees, and counts those that nobody holds."""
    size, windows = scheduler.config.page_size, scheduler.config.kv.windows
    held = {page for seq in scheduler.live.running for page in held_by(seq)}
    for salt, tokens in prompts:
        found, expected = scheduler.live.cache.tree.match(salt, tokens, len(tokens) - 1), longest_hit(
            scheduler, salt, tokens[:-1]
        )  # fmt: skip
        assert found.n_pages == len(expected), "a hit is not the longest"
        taken = set()
        for group, window in enumerate(windows):
            for i, pages in enumerate(expected):
                is_seen = not window or len(expected) * size - (i + 1) * size + 1 < window
                assert found.tables[group][i] == (pages[group] if is_seen else 0), "a hit has other pages"
                taken.update([pages[group]] if is_seen else [])
        assert found.n_unlocked == len(taken - held), "a hit miscounts the pages that nobody holds"


def has_all_for_a_fork(scheduler: Scheduler, seq: Seq, sibling: Seq) -> bool:
    """Whether a sibling holds, or is yet to take, each key of the prompt but its last that is seen from the last page
    border before that."""
    size, last = scheduler.config.page_size, seq.prompt_len - 1
    return all(
        position // size >= len(table) or table[position // size]
        for table, window in zip(sibling.tables, scheduler.config.kv.windows, strict=True)
        for position in range(last)
        if not window or last - last % size - position < window
    )


def check_contents(scheduler: Scheduler, device: NullExecutor) -> None:
    """B 13: K/V in the tree is what these tokens give, or non-finite and not yet noticed.

    Not to be asked while a faulted step is in flight.
    """
    size = scheduler.config.page_size
    for root in scheduler.live.cache.tree.roots.values():
        for group, window in enumerate(scheduler.config.kv.windows):
            stack: list[tuple[Node, list[int]]] = [(root, [])]
            while stack:
                node, before = stack.pop()
                state = State(window)
                for token in before:
                    state.add(state.row(token))
                for i, token in enumerate(node.tokens):
                    row, page = state.row(token), node.tables[group][i // size]
                    offset = i % size * ROW_BYTES
                    stored = device._rows[page][offset : offset + ROW_BYTES]
                    assert not page or stored in (row, NON_FINITE), (
                        f"page {page} in the tree holds other K/V than its path says"
                    )
                    state.add(row)
                stack += [(child, before + node.tokens) for child in node.children.values()]


def check_seqs(scheduler: Scheduler) -> None:
    """C 16, D 24, E 30: lengths in order; only running sequences hold anything; slots are held once."""
    live, config = scheduler.live, scheduler.config
    assert len(live.running) <= config.max_num_seqs
    assert sorted([seq.slot for seq in live.running] + live.free_slots[0]) == list(range(config.max_num_seqs)), "slots"
    assert [seq.key for seq in live.running] == sorted(seq.key for seq in live.running)
    for seq in unended_seqs(scheduler):
        seq.check()
        if seq.state is SeqState.WAITING:
            assert seq.slot == -1 and not seq.tables and seq.node is None and seq.planned == 0, "a waiting holder"
        else:
            assert seq in live.running


def check_stats(scheduler: Scheduler, n_submitted: int, n_ended: int) -> None:
    """E 26, H 37: gauges equal the state, submitted = waiting + running + finished."""
    live, stats = scheduler.live, scheduler.stats()
    unended = unended_seqs(scheduler)
    assert stats.n_running == len(live.running) == sum(seq.state is SeqState.RUNNING for seq in unended)
    assert stats.n_waiting == sum(seq.state is SeqState.WAITING for seq in unended), "n_waiting differs from the state"
    assert sum(stats.finished.values()) == n_ended, "finish reasons do not add up to what ended"
    n_members = sum(len(search.members) - 1 for search in live.searches.values())
    assert n_submitted == stats.n_waiting + stats.n_running - n_members + n_ended
    assert all(search.root.state is not SeqState.ENDED for search in live.searches.values()), "an ended search stays"
    assert stats.n_pages_free == live.cache.n_available and stats.n_pages == scheduler.config.n_usable_pages
    rows = {one for seq in live.running for one in _rows(seq, scheduler.config.page_size)}
    assert stats.n_tokens_held == len(rows)
    held = {page for seq in live.running for page in held_by(seq)}
    assert stats.n_pages_saved == sum(len(held_by(seq)) for seq in live.running) - len(held)
    assert stats.n_slots_taken == len(held) * scheduler.config.page_size
    owner = {page: seq.slot % 254 + 2 for seq in live.running for page in held_by(seq)}
    for page, cell in enumerate(stats.page_map):
        assert cell == owner.get(page, 1 if live.cache.pool.refs[page] else 0) or (cell > 1 and page in owner)


def _rows(seq: Seq, size: int) -> list[tuple[int, int]]:
    """(page, token in it), of all groups."""
    return [
        (table[position // size], position % size)
        for table, first in zip(seq.tables, seq.held_from, strict=True)
        for position in range(first * size, seq.planned)
    ]
