"""The memory equation and its exact inverse: how much an engine takes, and how many KV pages fit into a budget.

    total = others + weights + workspace + logits + tables + graphs + states + adapters + peers + n_pages * page_bytes

One file for both the engine's start (`pages_within`) and `quire plan`. Does not measure anything: what the weights
take and what a device has (`Room`) is passed in.
Invariant: total_bytes(pages_within(b)) <= b < total_bytes(pages_within(b) + 1).
"""

from __future__ import annotations

import bisect
import dataclasses

from quire.config.arch import ModelArch
from quire.config.delta import DeltaSpec
from quire.config.kv import KVLayout, kv_layout
from quire.config.resolve import AdapterLimits
from quire.config.states import PIECE
from quire.core.errors import ConfigError
from quire.core.units import format_bytes
from quire.planner.adapters import kept_bytes, row_bytes
from quire.planner.context import most_rows
from quire.planner.peers import peer_bytes
from quire.planner.sampling import row_bytes as sampling_row_bytes

INT32_BYTES = 4
FLOAT32_BYTES = 4
TOKEN_ID_BYTES = 8
LOGITS_COPIES = 2
"""Arrays of [rows, vocab] alive at once in sampling: the logits, and what they were before penalties for those who ask
for logprobs. On a GPU they have the activations' type."""
MERGE_COPIES = 3
"""Arrays like those of partial states, in float32, alive at once while these are merged."""
EXCHANGE_COPIES = 4
"""Of rows that ranks exchange: as they came, as experts take them, what these make of them, and as they go back."""
LARGE_TILE_ROWS, SMALL_TILE_ROWS = 128, 16
"""Rows of attention's tiles, tokens x query heads of a KV head; more heads than these make small tiles of their own."""
GRAPH_PARTS = 2 * 256
"""Partial results of a query head group that a captured decode keeps: two for each cut, one cut for each block of the
grid, at most as many as any GPU of today has multiprocessors."""
WIDENED_BYTES = 1 << 30
"""Keys and values in e4m3 that prompts of a step see, of one layer, as numbers of the activations' type, and a page
table of them: beyond it they stay as they are (`kernels/attention/coded`)."""
GRAPH_OWN_BYTES = 6 << 20
"""A round estimate, not measured: what the driver takes, besides tensors, for the graphs of one decode size: its
forward, its sampling and a mixed one."""


def n_passing(depth: int, n_stages: int) -> int:
    """`MemoryEquation.n_passing` of a stage between two others. depth: steps in flight, were there one stage."""
    return 0 if n_stages == 1 else depth + n_stages


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What an engine may take of the memory of one device."""

    total_bytes: int
    """Of the device."""
    free_bytes: int
    is_main: bool = True
    """It is the host's main memory: others take and leave it all the time, so what counts is what is free. A device's
    own is shared out: an engine has a share of the whole, less what was in use before it came."""
    swap_bytes: int = 0
    address_bytes: int = 1 << 62
    """Address space that is left under `ulimit -v`."""
    own_bytes: int = 0
    """What this process holds of main memory."""

    @property
    def used_bytes(self) -> int:
        """Taken by anybody."""
        return self.total_bytes - self.free_bytes

    def of_one(self, n_ranks: int) -> Room:
        """What one of several ranks may take: main memory is one for all of them, a device's is each rank's own."""
        if not self.is_main or n_ranks == 1:
            return self
        total, free, swap = (n // n_ranks for n in (self.total_bytes, self.free_bytes, self.swap_bytes))
        return dataclasses.replace(self, total_bytes=total, free_bytes=free, swap_bytes=swap)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEquation:
    """All terms in bytes, from a shape and the limits of the scheduler."""

    arch: ModelArch
    page_size: int
    """Tokens a page, of all ranks that have some of them."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    weights_bytes: int
    """Matrices as their schemes store them, embeddings and norms."""
    itemsize: int = 2
    """Bytes an activation."""
    kv_itemsize: float = 2
    """Bytes a number in the KV cache, scales counted in."""
    graph_sizes: tuple[int, ...] = ()
    """Sequences of each captured decode step; empty where none is captured. They are captured once the pool stands, so
    their memory is kept free beforehand."""

    mixed_rows: int = 0
    """Rows of the largest captured step that is not decode alone; 0 where none is captured."""

    kv: KVLayout | None = None
    """The groups of layers; None: those of the shape."""
    in_flight: int = 2
    """Tokens of a sequence whose steps may not have ended when the next is planned: `tokens_in_flight`."""
    max_sampled: int = 0
    """Tokens that a step chooses at most; 0: one for each sequence."""
    draft_numbers: int = 0
    """Numbers that a draft model, or a head, keeps of a token in pages of its own, of which it has as many."""
    prompt_in_flight: int = 0
    """The same of a prompt that is computed in whole steps: a chunk of each step in flight; less where pages lack."""
    n_snapshots: int = 0
    """Recurrent states that are kept beside those of the slots."""
    n_passing: int = 0
    """Steps of whose rows a stage of a pipeline has copies: on their way to the next one, or from the one before."""
    exchanged_rows: int = 0
    """Of all data-parallel ranks together, which a rank has at most at once where they send rows to one another's
    experts; 0: they do not."""
    row_ranks: int = 1
    """Ranks among which the rows of long steps are divided."""
    page_ranks: int = 1
    """Ranks that hold the tokens of a page in turn, each as many."""
    others_bytes: int = 0
    """In use on the device before this engine took anything; within its budget, where that is a share of the whole."""
    adapters: AdapterLimits | None = None
    """Their places on the device count as weights."""
    on_gpu: bool = False
    """Tokens are chosen by kernels that list a part of a row's logits."""
    widens_keys: bool = False
    """Keys and values are e4m3, which prompts read in the activations' type: on a Hopper GPU."""
    sum_ranks: int = 0
    """Ranks whose sums go through memory that their GPUs share; fewer than two: there are none."""

    @property
    def layout(self) -> KVLayout:
        """How pages hold the layers."""
        return kv_layout(self.arch, self.max_model_len) if self.kv is None else self.kv

    @property
    def workspace_bytes(self) -> int:
        """Activations of the largest step; of a stage the residual of as large steps that come or go; rows on their way
        to experts of other ranks, and back, or between ranks that share tokens; and keys as prompts read them."""
        passing_bytes = self.n_passing * self.max_num_batched_tokens * self.stream_bytes
        exchanged_bytes = self.exchanged_rows * EXCHANGE_COPIES * self.arch.hidden_size * self.itemsize
        return self.activations_bytes + passing_bytes + exchanged_bytes + self._travel_bytes + self.widened_bytes

    @property
    def widened_bytes(self) -> int:
        """Keys and values of one layer that a step's prompts see, at most, beside what they are kept as."""
        if not self.widens_keys or not self.layout.n_lanes:
            return 0
        n_pages = self.max_num_seqs * -(-self.max_model_len // self.page_size)
        page_bytes = self.page_size // self.page_ranks * self.layout.groups[0].spec.numbers * self.itemsize
        return min(WIDENED_BYTES, n_pages * (page_bytes + INT32_BYTES))

    @property
    def stream_bytes(self) -> int:
        """The residual of one token."""
        return self.arch.hidden_size * (FLOAT32_BYTES if self.arch.float32_stream else self.itemsize)

    @property
    def activations_bytes(self) -> int:
        """Of the largest step's rows that one rank has; more where they belong to many short spans whose pieces are
        solved apart."""
        n_rows = most_rows(self.max_num_batched_tokens, self.row_ranks)
        return n_rows * self._row_bytes + max(0, self._solved_bytes(n_rows) - n_rows * self._widest * self.itemsize)

    def _solved_bytes(self, n_rows: int) -> int:
        """Of the delta rule on a GPU, beside what surrounds a layer. A span has whole pieces and a shorter one, and one
        more where a state is kept on its way."""
        mixers = {one.mixer for one in self.arch.layers if isinstance(one.mixer, DeltaSpec)} if self.on_gpu else ()
        n_ends = self.max_num_seqs + min(self.max_num_seqs, self.n_snapshots)
        n_pieces, size = min(n_rows, n_rows // PIECE + n_ends), self.itemsize
        return max(
            (n_rows * one.n_solved_numbers * size + one.pieces_bytes(n_pieces, size) for one in mixers), default=0
        )

    @property
    def _row_bytes(self) -> int:
        """Of one row: residual, normed input, and the widest pair of neighbours inside a layer."""
        return self.stream_bytes + (self.arch.hidden_size + self._widest) * self.itemsize

    @property
    def _widest(self) -> int:
        """Numbers of a row inside a layer, of the widest."""
        kinds, size = dict.fromkeys(self.arch.layers), self.arch.hidden_size
        return max(max(one.mixer.n_row_numbers, one.ffn.n_row_numbers(size)) for one in kinds)

    @property
    def _travel_bytes(self) -> int:
        """Of rows on their way between ranks: what a rank's heads need of all rows, as it is sent and as it comes; and
        what each rank's keys make of its rows, and these states once more in float32 while they are merged."""
        if self.row_ranks == 1:
            return 0
        widest = max(one.mixer.n_row_numbers for one in dict.fromkeys(self.arch.layers))
        n_bytes = 0
        if self.row_ranks > self.page_ranks:
            n_bytes += 2 * -(-self.max_num_batched_tokens // self.page_ranks) * widest * self.itemsize
        if self.page_ranks > 1:
            n_bytes += self.max_num_batched_tokens * widest // 2 * (self.itemsize + MERGE_COPIES * FLOAT32_BYTES)
        return n_bytes

    @property
    def logits_bytes(self) -> int:
        """Logits and what sampling makes of them, a row for each token that a step chooses: two copies, in float32 on a
        CPU. On a GPU also the sampler's lists, and one float32 copy for what is changed, unless that is done in place:
        logits are float32, and no captured choice keeps that copy."""
        n_tokens, n_rows = self.arch.vocab_size, self._sampled_rows
        if not self.on_gpu:
            return n_rows * LOGITS_COPIES * n_tokens * FLOAT32_BYTES
        changed = 0 if self.itemsize == FLOAT32_BYTES and not self.graph_sizes else FLOAT32_BYTES
        copies_bytes = n_tokens * (LOGITS_COPIES * self.itemsize + changed)
        return n_rows * (copies_bytes + sampling_row_bytes(n_tokens, self.itemsize))

    @property
    def _sampled_rows(self) -> int:
        """Of logits that tokens are chosen from in one step."""
        return self.max_sampled or self.max_num_seqs

    @property
    def tables_bytes(self) -> int:
        """Token table [slots, max_model_len] and page tables [groups, slots, pages a sequence], int32."""
        n_pages = len(self.layout.groups) * -(-self.max_model_len // self.page_size)
        return self.max_num_seqs * (self.max_model_len + n_pages) * INT32_BYTES

    @property
    def graphs_bytes(self) -> int:
        """What captured steps keep, all together: partial attention of each kind of window (float32 rows of a query
        head group and one number a row), one set of logits and of activations, and what the driver takes."""
        if not self.graph_sizes:
            return 0
        arch, n_rows = self.arch, max(*self.graph_sizes, self.mixed_rows)
        group = arch.n_heads // arch.n_kv_heads
        partial_rows = GRAPH_PARTS * group
        if self.mixed_rows:
            n_large = 1 + (self.mixed_rows + self.max_num_seqs) // (max(1, SMALL_TILE_ROWS // group) + 1)
            partial_rows += (n_large * LARGE_TILE_ROWS + 2 * self.mixed_rows * group) * arch.n_kv_heads
        n_kinds = len(set(self.layout.windows))
        n_bytes = n_kinds * partial_rows * (arch.head_dim + 1) * FLOAT32_BYTES
        n_bytes += self._sampled_rows * arch.vocab_size * self.itemsize
        return n_bytes + n_rows * self._row_bytes + len(self.graph_sizes) * GRAPH_OWN_BYTES

    @property
    def state_bytes(self) -> int:
        """Of one sequence, in all recurrent layers."""
        return sum(spec.n_bytes(self.itemsize) for spec in self.arch.state_specs.values())

    @property
    def states_bytes(self) -> int:
        """Of all slots, of padding, and of snapshots."""
        return (self.max_num_seqs + 1 + self.n_snapshots) * self.state_bytes

    @property
    def adapters_bytes(self) -> int:
        """What the largest step has beside the workspace, all of its rows with adapters."""
        if self.adapters is None:
            return 0
        rank, in_main = self.adapters.max_rank, self.adapters.in_main
        return self.max_num_batched_tokens * row_bytes(
            self.arch, rank, self.itemsize, in_main=in_main, with_experts=self.adapters.with_experts
        )

    @property
    def kept_adapters_bytes(self) -> int:
        """Of those that the host keeps, where its memory is the device's."""
        if self.adapters is None or not self.adapters.in_main:
            return 0
        own = self.adapters
        return own.n_kept * kept_bytes(self.arch, own.max_rank, self.itemsize, with_experts=own.with_experts)

    @property
    def peers_bytes(self) -> int:
        """Shared with the GPUs of other ranks."""
        return peer_bytes(self.sum_ranks)

    @property
    def page_bytes(self) -> int:
        """K and V of this rank's part of a page in all of its lanes, and in a drafter's. Where no layer keeps keys,
        pages only say which tokens were seen: they count as the host's ids of these."""
        n_own = self.page_size // self.page_ranks
        n_bytes = round((self.layout.numbers + self.draft_numbers) * n_own * self.kv_itemsize)
        return n_bytes or self.page_size * TOKEN_ID_BYTES

    def seq_pages(self, n_tokens: int) -> int:
        """Pages that a sequence of `n_tokens` holds at its end, in all groups."""
        return self.layout.seq_pages(n_tokens, self.page_size, self.in_flight)

    def prompt_pages(self, n_tokens: int) -> int:
        """Pages that such a sequence holds at most while its prompt is computed in whole steps."""
        return self.layout.seq_pages(n_tokens, self.page_size, max(self.in_flight, self.prompt_in_flight))

    def prompt_within(self, n_pages: int) -> int:
        """Tokens that can be in flight of a prompt of `max_model_len`, which so many pages can hold, behind a window;
        at most `prompt_in_flight`."""
        numbers = range(self.in_flight + 1, self.prompt_in_flight + 1)
        return self.in_flight + bisect.bisect_right(
            numbers, n_pages, key=lambda n: self.layout.seq_pages(self.max_model_len, self.page_size, n)
        )

    def tokens_within(self, n_pages: int) -> int:
        """The longest sequence that can be alone in so many pages, without the dummy page, in whole pages."""
        return self.layout.tokens_within(n_pages, self.page_size, self.in_flight)

    @property
    def min_pages(self) -> int:
        """The dummy page, and for a sequence one of each group."""
        return 1 + len(self.layout.groups)

    @property
    def fixed_bytes(self) -> int:
        """Everything but the pages."""
        own_bytes = self.weights_bytes + self.workspace_bytes + self.logits_bytes + self.tables_bytes
        adapters_bytes = self.adapters_bytes + self.kept_adapters_bytes
        own_bytes += self.graphs_bytes + self.states_bytes + adapters_bytes + self.peers_bytes
        return self.others_bytes + own_bytes

    def total_bytes(self, n_pages: int) -> int:
        """The equation: bytes of an engine with `n_pages` pages, the dummy page included."""
        return self.fixed_bytes + n_pages * self.page_bytes

    def pages_within(self, budget_bytes: int) -> int:
        """Its inverse: most pages (dummy included) such that the total is within the budget.

        ConfigError that shows every term, and what to change, if fewer than `min_pages` fit.
        """
        n_pages = (budget_bytes - self.fixed_bytes) // self.page_bytes
        if n_pages < self.min_pages:
            raise ConfigError(self.explain(budget_bytes))
        return n_pages

    def explain(self, budget_bytes: int) -> str:
        """The terms beside the budget in GiB, and which option moves which."""
        say = _gib if budget_bytes >= 1 << 30 else format_bytes
        lacking = self.total_bytes(self.min_pages) - budget_bytes
        verdict = f"short by {say(lacking)}" if lacking > 0 else f"{self.pages_within(budget_bytes)} KV pages fit"
        full_pages = self.seq_pages(self.max_model_len)
        others = "other programs and engines, and the device's own"
        pages = format_bytes(self.page_bytes)
        terms = (
            *([("others", self.others_bytes, others)] if self.others_bytes else []),
            ("weights", self.weights_bytes, "a smaller model or dtype"),
            ("workspace", self.workspace_bytes, f"lower --max-num-batched-tokens {self.max_num_batched_tokens}"),
            ("logits", self.logits_bytes, f"lower --max-num-seqs {self.max_num_seqs}"),
            ("tables", self.tables_bytes, f"lower --max-model-len {self.max_model_len} or --max-num-seqs"),
            ("graphs", self.graphs_bytes, f"lower --max-num-seqs {self.max_num_seqs} or use --enforce-eager"),
            *(
                [("states", self.states_bytes, f"lower --max-num-seqs {self.max_num_seqs}")]
                if self.states_bytes
                else []
            ),
            *(
                [("adapters", self.adapters_bytes + self.kept_adapters_bytes, self._fewer_adapters)]
                if self.adapters is not None
                else []
            ),
            ("peers", self.peers_bytes, f"for sums over {self.sum_ranks} ranks; QUIRE_PEER_MEMORY=0 does without"),
            ("KV pages", self.min_pages * self.page_bytes, f"at least: {self.min_pages} of {pages}"),
        )
        lines = [f"memory: a budget of {say(budget_bytes)}, {verdict}"]
        lines += [f"  {name:<10}{say(n_bytes):>14}  ({change})" for name, n_bytes, change in terms if n_bytes]
        full = say(full_pages * self.page_bytes)
        lines.append(f"  one sequence of {self.max_model_len} tokens takes {full_pages} pages, {full}")
        more_pages = self.prompt_pages(self.max_model_len) - full_pages
        if more_pages:
            more = say(more_pages * self.page_bytes)
            lines.append(f"  and {more_pages} more, {more}, while its prompt is computed: with fewer, in smaller steps")
        lines.append("  or raise the budget: --kv-cache-memory-bytes, or --gpu-memory-utilization of a GPU")
        return "\n".join(lines)

    @property
    def _fewer_adapters(self) -> str:
        assert self.adapters is not None
        kept = f" or --max-cpu-loras {self.adapters.n_kept}" if self.adapters.in_main else ""
        return f"lower --max-lora-rank {self.adapters.max_rank}{kept}"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.3f} GiB"
