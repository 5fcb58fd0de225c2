"""What an engine says to its clients, one batched message a step, and to the process that started it."""

from __future__ import annotations

import enum
from typing import Union

import msgspec

from quire.core.adapters import AdapterFacts
from quire.core.balance import BalanceFacts
from quire.core.failure import Failure
from quire.core.logprobs import PackedLogprobs
from quire.core.routing import RoutingStats


@enum.unique
class FinishReason(enum.Enum):
    """Why a sequence ended. `abort` and `error` never appear as a normal completion."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SeqDelta(msgspec.Struct, array_like=True):
    """What one sequence gained in a step. The last one of a sequence has `finish_reason`; nothing follows it."""

    request_id: str
    index: int
    """0 .. n-1 inside its request."""
    token_ids: list[int]
    """New tokens; the end token or stop token that ended the sequence is included."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The id that ended it, if one did."""
    failure: Failure | None = None
    """Why, when `finish_reason` is ERROR."""
    logprobs: PackedLogprobs | None = None
    """One row a token of `token_ids`, when asked."""
    prompt_logprobs: PackedLogprobs | None = None
    """Rows for prompt tokens 1 .. prompt_len-1, once, with the first delta of sequence 0, when asked."""
    n_cached: int = 0
    """Prompt tokens found in the prefix cache (meaningful in the first delta)."""
    queued_s: float = 0.0
    """Seconds that it waited for its first slot (meaningful in the first delta, of requests with a label)."""
    pooled: list[float] | None = None
    """[hidden_size]: what a request with `pooling` wants, in its only delta."""
    cum_logprob: float | None = None
    """Sum of the log-probabilities of a hypothesis of a beam search, which comes whole in one delta."""


class EngineStats(msgspec.Struct):
    """Gauges are values now; counters only grow."""

    n_running: int = 0
    n_waiting: int = 0
    n_pages: int = 0
    n_pages_free: int = 0
    """Pages that can be taken now: free or cached without an owner."""
    n_pages_cached: int = 0
    """Pages held by the prefix tree alone."""
    n_tree_nodes: int = 0
    """Nodes of the prefix tree, also those that `tree` has no room for."""
    n_tokens_held: int = 0
    """Tokens whose K/V running sequences hold, shared ones counted once a page, each group of layers for itself."""
    n_slots_taken: int = 0
    """Token slots of the pages that running sequences hold; utilisation = held / taken."""
    n_pages_saved: int = 0
    """Pages that running sequences would hold beside theirs if they shared none."""
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    computed_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix tree."""
    prefix_hits: int = 0
    """Of these, found."""
    n_drafts: int = 0
    """Times that a sequence verified drafts."""
    draft_tokens: int = 0
    """These drafts."""
    draft_saved_s: float = 0.0
    """Seconds that plain steps would have taken longer, by what they are known to take; below 0: lost."""
    accepted_at: list[int] = []
    """Of these, the right ones, by their place: the first draft behind a known token, the second, ..."""
    preemptions: int = 0
    expert_imbalance: float = 0.0
    """Tokens of a layer's busiest expert over those of its mean one, the mean of all layers; 0 without experts."""
    expert_map: list[bytes] = []
    """Of each layer with experts a byte for each: its tokens over those of the layer's mean one, in sixteenths, at most
    255; zeros where a layer has seen no token."""
    expert_layers: list[int] = []
    """Of each row of `expert_map` the layer's number in the model, from 0."""
    expert_balance: BalanceFacts | None = None
    """Of the last rearrangement of experts; None: they stay where they are."""
    dp_running: list[int] = []
    """Sequences that run on each data-parallel rank; empty where there is one."""
    dp_pages_free: list[int] = []
    """Of `n_pages_free` those of each, likewise."""
    finished: dict[str, int] = {}
    """Finish reason → sequences."""
    last_step_age_s: float = 0.0
    """Seconds since the last step ended while work was waiting; 0 when idle."""
    is_late: bool = False
    """One of its ranks gives no sign of life."""
    adapters: list[AdapterFacts] = []
    """Those that requests can name."""
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    """Names of those that running and waiting requests have."""
    is_asleep: bool = False
    """Its memory was given back: no request is taken until it is woken."""
    steps_in_flight: int = 0
    """Steps handed to compute whose results have not been committed."""
    routing: RoutingStats | None = None
    """What is known of the prefixes of several replicas; None: it is one engine."""
    tree: list[tuple[int, int, int]] = []
    """Nodes of the prefix tree for the live view, the heaviest when there are hundreds, parents first: (index of the
    parent or -1, pages, sequences that hold it). Shapes only: neither whose prefixes they are nor what they say."""
    page_map: bytes = b""
    """One byte a page for the live view, at most 4,096: 0 free, 1 cached, else held (2 + owner slot modulo 254)."""

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_at)


class StepOutputs(msgspec.Struct, tag="outputs"):
    """All deltas of one step, for all requests of a client."""

    deltas: list[SeqDelta] = []
    stats: EngineStats | None = None
    """Sent now and then, not with every step."""


class Chunk(msgspec.Struct, array_like=True):
    """A part of a prompt that one step computed. Times are seconds since the request's arrival."""

    step: int
    time_s: float
    start: int
    length: int
    n_others: int
    """Sequences that shared the step."""


class StepGroup(msgspec.Struct, array_like=True):
    """Some steps in a row that a request lived through."""

    time_s: float
    """When the last of them was committed, since the request's arrival."""
    n_steps: int
    mean_seqs: float
    """Sequences in a step."""
    n_prompt_tokens: int
    """Prompt tokens that these steps computed, whoever's: they make steps long."""
    n_mixed: int = 0
    """Of the steps, those that computed some."""
    n_chunks: int = 0
    """Parts of prompts in them."""
    mean_before: float = 0.0
    """Tokens before those that a step computed, of all its sequences together: their keys are read."""
    n_runs: int = 0
    """Of steps that computed prompt tokens, one behind the other: so many runs of them."""


class Explanation(msgspec.Struct):
    """Where the time of one request went. Times are seconds since its arrival; None: not yet, or never."""

    label: str
    tenant: str
    prompt_len: int
    n: int
    admitted_s: float | None = None
    """It got its first slot: until then it waited."""
    first_token_s: float | None = None
    ended_s: float | None = None
    end: str = ""
    """Finish reason; empty while it lives."""
    n_waiting_before: int = 0
    """Sequences that waited when it came."""
    n_cached: int = 0
    """Prompt tokens found in the prefix cache."""
    miss_position: int | None = None
    """First prompt position at which the best cached path differs."""
    miss_wanted: int | None = None
    """The prompt's token there."""
    miss_cached: int | None = None
    """The cache's token there; None: the cached path ends there."""
    miss_lost: int = 0
    """Tokens before it that were in the cache but of no use: keys in the window of the token behind were evicted."""
    chunks: list[Chunk] = []
    n_outputs: int = 0
    n_drafts: int = 0
    """Times that its sequences verified drafts."""
    draft_tokens: int = 0
    """These drafts."""
    drafts_kept: int = 0
    """Of these, those that became output: each spared its sequence a step."""
    n_preemptions: int = 0
    steps: list[StepGroup] = []
    """What it lived through, in at most some tens of groups."""
    n_first: int = 0
    """Of these groups, those up to its first token."""
    waits: list[StepGroup] = []
    """Steps of others that were committed while it waited; it came in the middle of the first."""


class Explained(msgspec.Struct, tag="explained"):
    """Answer to Explain; empty for a label that is unknown or forgotten."""

    ticket: int
    found: list[Explanation] = []


class Done(msgspec.Struct, tag="done"):
    """Answer to an order. error: why it was not carried out; param: the field that is to blame for that, if one is."""

    ticket: int
    value: bool = True
    error: str | None = None
    param: str | None = None


class PrefixUpdate(msgspec.Struct, tag="prefixes"):
    """What has changed of what the prefix trees of an engine hold, for a client that follows it. Digests of pages
    (`control/digests.py`) stand one behind the other."""

    number: int
    """Of the update; 0 begins anew: forget what was told before. One that does not follow the last one shows a gap."""
    removed: bytes
    """To be taken out before the others are put in."""
    added: bytes
    n_left: int = 0
    """Digests that did not fit; 0: with this update it is known what the trees held when it was made."""


class ClientCut(msgspec.Struct, tag="cut"):
    """This client did not read what the engine sent: all requests that it had open were cancelled."""


class Leaving(msgspec.Struct, tag="leaving"):
    """A replica that has an engine ends because it was told to: it is not lost."""


class RequestsLost(msgspec.Struct, tag="lost"):
    """One of several engines is gone that ran these requests; the others live."""

    request_ids: list[str]
    reason: str


@enum.unique
class EndKind(enum.Enum):
    """How an engine process ended, as far as it tells who is to blame."""

    CRASH = "crash"
    """By a signal that faulty code causes, or by leaving without a word."""
    STALL = "stall"
    """It made no progress and was ended."""
    KILLED = "killed"
    """By a signal that others send, as the system does when memory runs out."""
    FAILED = "failed"
    """It gave up and said so, after it had answered every request with an error."""
    REFUSED = "refused"
    """Options or the checkpoint were in the way, and it said so: another one with the same would end so, too."""


class EngineFailed(msgspec.Struct, tag="failed"):
    """The engine could not be loaded, or its loop ended with an error."""

    message: str
    kind: EndKind = EndKind.FAILED
    """FAILED only if every open request was told; REFUSED only if it was not loaded."""


class Working(msgspec.Struct, array_like=True):
    """A request that an engine was computing when it ended."""

    request_id: str
    mark: bytes
    """Fingerprint of its content (`engine/quarantine.py`)."""
    n_outputs: int
    """Output tokens that its longest sequence would have had after the steps in flight; 0: its prompt was computed."""
    stage: int = 0
    """0: nobody knew it to be dangerous; 1: it was on trial; 2: it had come through its trial."""


class EngineEnd(msgspec.Struct):
    """The end of an engine process, and what it was computing then."""

    engine: int
    """Its number."""
    kind: EndKind
    working: list[Working] = []


class ModelFacts(msgspec.Struct):
    """What is said of a loaded model to clients that ask what it is."""

    family: str = ""
    """As in `config/arch`."""
    n_parameters: int = 0
    hidden_size: int = 0
    """Numbers of a vector of a prompt."""
    weight_bytes: int = 0
    """In memory."""
    weights: str = ""
    """How they are kept: a quantization, or a dtype."""


class EngineReady(msgspec.Struct, tag="ready"):
    """Sent once after loading."""

    max_model_len: int
    """Tokens of the longest sequence: the pool holds its keys."""
    n_pages: int
    page_size: int
    logits_width: int
    device: str
    max_num_seqs: int = 0
    """Sequences that run at once; 0 counts none beyond the queue."""
    engine: int = 0
    """Number of the engine process, counted by who starts them."""
    ends: list[EngineEnd] = []
    """Of the processes before it, oldest first, those of some time ago left out."""
    model: ModelFacts = msgspec.field(default_factory=ModelFacts)
    device_name: str = ""
    """As its driver calls it; empty: the host's cores, or none."""
    no_determinism: str = ""
    """Why requests cannot ask for `deterministic`; empty: they can."""
    deterministic_apart: bool = False
    """Requests that ask for it share cached pages among themselves alone."""


class Fetching(msgspec.Struct, tag="fetching"):
    """While it loads, a download from the hub begins or is over. Sent to the process that started the engine."""

    is_over: bool


class Heartbeat(msgspec.Struct, tag="beat"):
    """Sent to the process that started the engine, some times a second."""

    last_step_age_s: float
    """As in EngineStats."""
    steps_in_flight: int


Event = Union[StepOutputs, ClientCut, Explained, Done, EngineReady, Leaving, RequestsLost, PrefixUpdate]
"""What an engine, or a link to several, says to a client."""

Status = Union[EngineReady, EngineFailed, Fetching, Heartbeat]
"""What an engine tells the process that started it."""
