"""The groups of known models, pages counted key by key, and what windows save."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.arch import ModelArch
from quire.config.engine import EngineConfig
from quire.config.flags import FlagParser, add_flags, read_flags
from quire.config.kv import KVGroup, KVLayout, KVSpec, first_page, kv_layout
from quire.config.model import parse_arch, read_arch
from quire.config.resolve import resolve
from quire.core.errors import ConfigError
from quire.engine.capacity import layout_of

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "quire/bench/shapes"
GEMMA = read_arch(SHAPES / "gemma-3-1b")
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
windows_of_groups = st.lists(st.integers(0, 40), min_size=1, max_size=4)


def shaped(windows: Sequence[int]) -> ModelArch:
    """A model with such windows of its layers."""
    layer = GEMMA.layers[0]
    mixers = [msgspec.structs.replace(layer.mixer, window=window) for window in windows]
    layers = tuple(msgspec.structs.replace(layer, mixer=mixer) for mixer in mixers)
    return msgspec.structs.replace(GEMMA, layers=layers)


def layers_of(layout: KVLayout) -> list[tuple[int, tuple[int, ...]]]:
    return [(group.spec.window, group.layers) for group in layout.groups]


def grouped(windows: Sequence[int]) -> KVLayout:
    """A group of one layer for each window."""
    return KVLayout(tuple(KVGroup(KVSpec(1, 1, window), (i,)) for i, window in enumerate(windows)), 1)


def test_gemma_3_1b_has_pages_of_four_layers() -> None:
    layout = kv_layout(GEMMA)
    assert layers_of(layout) == [
        (0, (5, 11, 17, 23)),
        (512, (0, 1, 2, 3)),
        (512, (4, 6, 7, 8)),
        (512, (9, 10, 12, 13)),
        (512, (14, 15, 16, 18)),
        (512, (19, 20, 21, 22)),
        (512, (24, 25)),
    ]
    assert layout.n_lanes == 4 and layout.numbers == 4 * 2 * 256
    assert layout.places[5] == (0, 0) and layout.places[23] == (0, 3) and layout.places[25] == (6, 1)


def test_gemma_2_has_two_groups_of_half_the_layers() -> None:
    arch = parse_arch(GEMMA2)
    layout = kv_layout(arch)
    assert layers_of(layout) == [(0, tuple(range(1, 26, 2))), (4096, tuple(range(0, 26, 2)))]
    assert layout.n_lanes == 13
    assert layers_of(kv_layout(arch, 4096)) == [(0, tuple(range(26)))], "a window as long as the context is none"
    assert len(kv_layout(arch, 4097).groups) == 2


def test_layers_of_one_kind_are_one_group() -> None:
    assert layers_of(kv_layout(shaped([512] * 7))) == [(512, tuple(range(7)))]
    assert layers_of(kv_layout(shaped([0] * 7))) == [(0, tuple(range(7)))]
    assert layers_of(kv_layout(shaped([512] * 7), hybrid=False)) == [(0, tuple(range(7)))]


def test_several_windows_and_none_that_keeps_everything() -> None:
    layout = kv_layout(shaped([8, 64, 64] * 2))
    assert sorted(layers_of(layout)) == [(8, (0, 3)), (64, (1, 2)), (64, (4, 5))] and layout.n_full == 0


def test_layers_that_store_other_numbers_are_refused_by_name() -> None:
    layers = list(GEMMA.layers)
    wide = msgspec.structs.replace(layers[5].mixer, head_dim=512)
    layers[5] = msgspec.structs.replace(layers[5], mixer=wide)
    arch = msgspec.structs.replace(GEMMA, layers=tuple(layers))
    for hybrid in (True, False):
        with pytest.raises(ConfigError, match=r"1 KV heads of 512 \(1024 numbers a token\) in layers 5;? ?.*hold one"):
            kv_layout(arch, hybrid=hybrid)


def test_too_many_empty_lanes_or_groups_make_one_group() -> None:
    assert layers_of(kv_layout(shaped(range(1, 18)))) == [(0, tuple(range(17)))], "17 groups"
    kinds = [*range(1, 7), *range(7, 13), *range(7, 13)]
    assert layers_of(kv_layout(shaped(kinds))) == [(0, tuple(range(18)))], "18 groups, or 6 of 24 lanes empty"
    assert len(kv_layout(shaped(kinds[4:])).groups) == 8, "2 of 16 lanes empty"


@given(st.integers(1, 70), st.integers(0, 300), st.sampled_from([1, 2, 4, 16]))
def test_the_first_page_is_that_of_the_first_key_seen(window: int, token: int, page_size: int) -> None:
    seen = [key for key in range(token + 1) if token - key < window]
    assert first_page(window, token, page_size) == seen[0] // page_size
    assert first_page(0, token, page_size) == 0


@given(windows_of_groups, st.sampled_from([1, 2, 4, 16]), st.integers(1, 20), st.integers(1, 120))
def test_pages_are_those_of_the_keys_between_the_last_border_and_the_end(
    windows: list[int], page_size: int, in_flight: int, n_tokens: int
) -> None:
    """A sequence that has computed c tokens holds what token number b sees, the last page border up to c, and all to
    c + in_flight. The most of that, over a long sequence, is what `pages_of` says; it is exact."""
    for window, n_pages in zip(windows, grouped(windows).pages_of(n_tokens, page_size, in_flight), strict=True):
        most = 0
        for computed in range(n_tokens):
            border, end = computed // page_size * page_size, min(computed + in_flight, n_tokens)
            keys = [key for key in range(end) if not window or key > border - window]
            most = max(most, len({key // page_size for key in keys}))
        assert n_pages >= most
        if n_tokens >= 2 * (window + in_flight + page_size) or not window:
            assert n_pages == most


@given(windows_of_groups, st.sampled_from([1, 4, 16]), st.integers(1, 9), st.integers(0, 400))
def test_tokens_within_is_the_inverse_of_pages(
    windows: list[int], page_size: int, in_flight: int, n_pages: int
) -> None:
    layout = grouped(windows)
    n_tokens = layout.tokens_within(n_pages, page_size, in_flight)
    assert layout.seq_pages(n_tokens, page_size, in_flight) <= n_pages
    if n_tokens < 1 << 40:
        assert layout.seq_pages(n_tokens + 1, page_size, in_flight) > n_pages
    else:
        assert 0 not in windows


def test_a_long_sequence_of_gemma_takes_less_than_a_fifth() -> None:
    groups, one = kv_layout(GEMMA), kv_layout(GEMMA, hybrid=False)
    numbers = [layout.seq_pages(32768, 16, 2) * 16 * layout.numbers for layout in (groups, one)]
    assert 0.15 < numbers[0] / numbers[1] < 0.2


@pytest.mark.parametrize(("argv", "n_groups"), [([], 7), (["--disable-hybrid-kv-cache-manager"], 1)])
def test_the_flag_makes_one_group(argv: list[str], n_groups: int) -> None:
    parser = FlagParser(prog="quire")
    add_flags(parser, EngineConfig, title="options")
    config = read_flags(parser.parse_args(argv), EngineConfig)
    assert len(layout_of(config, resolve(config, GEMMA, "cpu"), GEMMA).groups) == n_groups
