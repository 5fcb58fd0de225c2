"""--speculative-config: what it may say."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.speculative import DEFAULT_DRAFTS, MOST_DRAFTS, read_speculative
from quire.core.errors import ConfigError


def test_none() -> None:
    assert read_speculative(None) is None and EngineConfig().speculative_config is None


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_a_method_alone_will_do(method: str) -> None:
    found = read_speculative({"method": method})
    assert found is not None and found.n_drafts == DEFAULT_DRAFTS[method]


def test_a_model_is_a_method() -> None:
    found = read_speculative({"model": "some/folder", "num_speculative_tokens": 3})
    assert found is not None and (found.method, found.model, found.n_drafts) == ("draft_model", "some/folder", 3)


def test_a_head_is_named_by_its_method() -> None:
    found = read_speculative({"method": "eagle3", "model": "some/folder"})
    assert found is not None and (found.method, found.model, found.n_drafts) == ("eagle3", "some/folder", 4)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 4}, (4, 4)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7}, (2, 7)),
    ],
)
def test_one_of_both_lengths_stands_for_both(given: dict[str, int], lookup: tuple[int, int]) -> None:
    found = read_speculative({"method": "ngram", **given})
    assert found is not None and found.lookup == lookup


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, 'speculative_config = {}: there is no "method": give "ngram", "suffix", "mtp", or "draft_model" or'),
        ({"method": None}, "speculative_config = {'method': None}: there is no \"method\""),
        ({"branching": 2, "model": "x"}, "speculative_config = {'branching': 2, 'model': 'x'}: branching is for"),
        ({"num_speculative_tokens": 4}, 'there is no "method"'),
        ({"model": "ngram"}, '"method": "ngram"'),
        ({"method": "ngramm"}, "ngramm"),
        ({"method": "eagle", "model": "x"}, "is not built: give ngram, suffix, draft_model, eagle3 or mtp"),
        ({"method": "mimo_mtp"}, "is an old name: give mtp"),
        ({"method": "eagle3"}, "needs a head"),
        ({"method": "suffix", "model": "x"}, "is for the methods 'draft_model', 'eagle3', 'mtp', not 'suffix'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": MOST_DRAFTS + 1}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 2}, "swap them"),
        ({"method": "suffix", "prompt_lookup_max": 2}, "is for the method 'ngram'"),
        ({"method": "draft_model"}, "needs a model"),
        ({"methd": "ngram"}, "methd is unknown: did you mean method?"),
        ({"method": "ngram", "num_spec_tokens": 4}, "did you mean num_speculative_tokens?"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "drafts stop by themselves"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 4}, "suffix_decoding_max_memory"),
        ({"method": "ngram", "branching": 2}, "branching is for the methods 'suffix', 'eagle3', 'mtp', not 'ngram'"),
        ({"method": "suffix", "branching": 17}, "branching"),
        ({"method": "suffix", "speculative_token_tree": "[(0,)]"}, "is for the methods 'eagle3', 'mtp'"),
        ({"method": "mtp", "speculative_token_tree": "[(0,)]", "branching": 2}, "exclude each other"),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (0, 0)]", "num_speculative_tokens": 3}, "is not the 2 of"),
        ({"method": "mtp", "speculative_token_tree": "(0"}, "it is no list of paths"),
        ({"method": "mtp", "speculative_token_tree": "(" * 5000}, "it is no list of paths"),
        ({"model": 5}, "model = 5 must be a folder or a name on the hub, in quotes"),
        ({"model": ""}, "model = '' must be a folder or a name on the hub"),
        ({"method": "mtp", "speculative_token_tree": "[()]"}, "give paths of one rank or more"),
        ({"method": "mtp", "speculative_token_tree": "[(0, 0)]"}, "it has (0, 0) and not (0,), behind which"),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (2,)]"}, "it has (2,) and not the better (1,): add it"),
        ({"method": "mtp", "speculative_token_tree": "[(0,), (0,)]"}, "it names (0,) twice"),
        ({"method": "mtp", "speculative_token_tree": "[(-1,)]"}, "has a rank outside 0 .. 15"),
        ({"method": "mtp", "speculative_token_tree": [[0] * n for n in range(1, 66)]}, "has 65 nodes"),
        ({"method": "eagle3", "model": "x", "speculative_eagle_topk": 2}, 'give "branching"'),
    ],
)
def test_what_is_refused_says_why(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as refused:
        EngineConfig(speculative_config=options).verify()
    assert said in str(refused.value)


def test_trees() -> None:
    written = "[(0,), (1,), (0, 0), (0,1),(1, 0)]"
    found = read_speculative({"method": "mtp", "speculative_token_tree": written})
    assert found is not None and found.tree is not None and found.n_drafts == 5
    assert found.tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0)) and found.tree.branching == 2
    listed = read_speculative({"method": "mtp", "speculative_token_tree": [[1], [0], [0, 0], [1, 0], [0, 1]]})
    assert listed is not None and listed.tree == found.tree
    grown, chain = (read_speculative({"method": "suffix", "branching": n}) for n in (3, 1))
    assert grown is not None and grown.tree is not None and (grown.tree.branching, grown.tree.paths) == (3, ())
    assert chain is not None and chain.tree is None
