"""`--speculative-config`: who guesses tokens ahead, and how many; a JSON object in vLLM's spelling.

Owns its keys, their bounds and what is refused by name. Does not own the drafters (`compute/draft`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from quire.config.token_tree import MOST_BRANCHING, TreeShape, read_tree
from quire.core.errors import ConfigError, shown

MOST_DRAFTS: Final = 64
DEFAULT_DRAFTS: Final = {"ngram": 8, "suffix": 24, "draft_model": 8, "eagle3": 4, "mtp": 4}
"""Of each method: the most that a step verifies; how many it does verify is chosen step by step."""

Count = Annotated[int, Meta(ge=1, le=MOST_DRAFTS)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who guesses, and at most how many tokens a step."""

    method: Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
    num_speculative_tokens: Count | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: tokens of the longest ending that is looked for."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: of the shortest."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    suffix_decoding_max_memory: Annotated[int, Meta(ge=1 << 16)] = 64 << 20
    """Bytes that earlier outputs may take together. Not of vLLM, which counts requests."""
    branching: Annotated[int, Meta(ge=1, le=MOST_BRANCHING)] | None = None
    """suffix, eagle3, mtp: the most guesses for one place: drafts are a tree, grown where that is the likeliest. None
    or 1: a chain. Not of vLLM; SGLang calls it speculative_eagle_topk."""
    speculative_token_tree: str | list[list[int]] = ""
    """eagle3, mtp: a fixed tree: a path of ranks for each draft, as "[(0,), (1,), (0, 0)]"."""
    model: str = ""
    """draft_model, eagle3, mtp: folder or hub name, as --model; mtp: empty: the module stands in the model's own."""

    @property
    def n_drafts(self) -> int:
        """The most drafts of one sequence in a step."""
        fixed = len(self.tree.paths) if self.tree else 0
        return self.num_speculative_tokens or fixed or DEFAULT_DRAFTS[self.method]

    @property
    def tree(self) -> TreeShape | None:
        """How drafts branch; None: they are chains. Raises ValueError for a wrong speculative_token_tree."""
        if self.speculative_token_tree:
            return read_tree(self.speculative_token_tree, MOST_DRAFTS)
        return TreeShape(self.branching) if self.branching and self.branching > 1 else None

    @property
    def lookup(self) -> tuple[int, int]:
        """ngram: shortest and longest ending that is looked for, as in vLLM: one of both stands for both."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or (self.prompt_lookup_max or 2), longest


OF_METHOD: Final = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
        "suffix_decoding_max_memory",
    ),
}  # fmt: skip
"""Keys that mean something for one method alone."""
COPYING: Final = ("ngram", "suffix")
"""Methods whose drafts are what stood before in a text."""
WITH_MODEL: Final = {"draft_model": "a model", "eagle3": "a head", "mtp": ""}
"""Method → what the key "model" must name for it, if it must; the others take none."""
BRANCHING: Final = {"branching": ("suffix", "eagle3", "mtp"), "speculative_token_tree": ("eagle3", "mtp")}
"""Key → the methods whose drafts can be trees."""

REFUSED_METHODS: Final = {
    "eagle medusa mlp_speculator dflash extract_hidden_states custom_class":
        "is not built: give ngram, suffix, draft_model, eagle3 or mtp",
    "deepseek_mtp glm4_moe_mtp mimo_mtp": "is an old name: give mtp",
    "ngram_gpu": "is not built: give ngram",
}  # fmt: skip
REFUSED_KEYS: Final = {
    "disable_by_batch_size speculative_disable_by_batch_size":
        "leave it out: drafts stop by themselves where they cost more than they bring",
    "draft_tensor_parallel_size":
        "leave it out: a draft model, a head and a module are divided as the model is, and the other methods have no"
        " weights",
    "max_model_len": "leave it out: the draft model has the length of the model",
    "suffix_decoding_max_cached_requests": "give suffix_decoding_max_memory, in bytes",
    "quantization": "leave it out: the draft model is read as the model is, see --quantization",
    "rejection_sample_method draft_sample_method synthetic_acceptance_rate acceptance_method":
        "leave it out: a draft counts if it is the token that is chosen without it",
    "disable_padded_drafter_batch use_local_argmax_reduction parallel_drafting enforce_eager revision code_revision"
    " attention_backend moe_backend tensor_parallel_size": "leave it out",
    "speculative_eagle_topk": 'give "branching"',
}  # fmt: skip


def read_speculative(options: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """None for None: nothing is drafted. Raises ConfigError that names the key, its value and what to do."""
    if options is None:
        return None
    try:
        return _read(options)
    except _WrongOptions as error:
        raise ConfigError(f"speculative_config = {shown(dict(options))}: {error}", param="speculative_config") from None


class _WrongOptions(Exception):
    """What is wrong, without the options as they were given."""


def _read(options: Mapping[str, Any]) -> SpeculativeConfig:
    options = {key: value for key, value in options.items() if value is not None}
    if "method" not in options:
        options["method"] = _method_of(options)
    _refuse(options)
    try:
        found = msgspec.convert(options, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise _WrongOptions(_wrong_value(f"{error}", options)) from None
    for method, keys in OF_METHOD.items():
        given = [key for key in keys if key in options]
        if given and method != found.method:
            raise _WrongOptions(f"{given[0]} is for the method {method!r}, not {found.method!r}: leave it out")
    if "model" in options and found.method not in WITH_MODEL:
        known = ", ".join(map(repr, WITH_MODEL))
        raise _WrongOptions(f"model is for the methods {known}, not {found.method!r}: leave it out")
    _check_tree(found, options)
    what = WITH_MODEL.get(found.method)
    if what and not found.model:
        raise _WrongOptions(f"the method {found.method!r} needs {what}: add its folder or hub name as 'model'")
    shortest, longest = found.lookup
    if shortest > longest:
        raise _WrongOptions(f"prompt_lookup_min = {shortest} is more than prompt_lookup_max = {longest}: swap them")
    return found


def _check_tree(found: SpeculativeConfig, options: Mapping[str, Any]) -> None:
    for key, methods in BRANCHING.items():
        if key in options and found.method not in methods:
            known = ", ".join(map(repr, methods))
            raise _WrongOptions(f"{key} is for the methods {known}, not {found.method!r}: leave it out")
    if found.branching and found.speculative_token_tree:
        raise _WrongOptions("branching and speculative_token_tree exclude each other: leave one out")
    try:
        tree = found.tree
    except ValueError as error:
        raise _WrongOptions(f"speculative_token_tree: {error}") from None
    if tree is not None and tree.paths and found.n_drafts != len(tree.paths):
        raise _WrongOptions(
            f"num_speculative_tokens = {found.num_speculative_tokens} is not the {len(tree.paths)} of "
            "speculative_token_tree: leave it out"
        )


def _method_of(options: Mapping[str, Any]) -> str:
    """As vLLM does: words in place of a model name a method."""
    model = options.get("model")
    if model in ("ngram", "[ngram]") or "prompt_lookup_max" in options:
        raise _WrongOptions('add "method": "ngram"')
    if isinstance(model, str) and model:
        return "draft_model"
    _check_known(options)
    if model is not None:
        raise _WrongOptions(f"model = {shown(model)} must be a folder or a name on the hub, in quotes")
    raise _WrongOptions(
        'there is no "method": give "ngram", "suffix", "mtp", or "draft_model" or "eagle3" with a "model", or leave'
        " speculative_config out"
    )


def _refuse(options: Mapping[str, Any]) -> None:
    for names, why in REFUSED_METHODS.items():
        if options["method"] in names.split():
            raise _WrongOptions(f"the method {shown(options['method'])} {why}")
    for names, what in REFUSED_KEYS.items():
        for key in options:
            if key in names.split():
                raise _WrongOptions(f"{key} = {shown(options[key])} means nothing here: {what}")
    _check_known(options)


def _check_known(options: Mapping[str, Any]) -> None:
    fields = SpeculativeConfig.__struct_fields__
    for key in options:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            raise _WrongOptions(f"{key} is unknown: {hint}")


def _wrong_value(said: str, options: Mapping[str, Any]) -> str:
    """What msgspec says of a value, with the value and what it can be."""
    problem, _, place = said.partition(" - at `$.")
    key = place.split("`")[0].split("[")[0]
    if key == "method":
        return f"method = {shown(options[key])} is not one of {', '.join(DEFAULT_DRAFTS)}"
    if key not in options:
        return said
    return f"{key} = {shown(options[key])}: {problem.replace('`', '').replace(' | null', '').replace('E', 'e', 1)}"
