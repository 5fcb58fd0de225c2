"""Memory of training against the tables and formulas of the papers that it is counted by."""

from __future__ import annotations

import msgspec
import pytest
from planner_shapes import LLAMA_8B
from training_shapes import GPTS, LLAMA_2, MIXTURES, gpt

from quire.config.arch import ModelArch
from quire.core.errors import ConfigError
from quire.planner.training.activations import kept_by_layer, stage_activations
from quire.planner.training.setup import Checkpointing, TrainingSetup
from quire.planner.training.states import stage_parameters, states

FULL, SELECTIVE, NONE = Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.NONE


@pytest.mark.parametrize(("size", "replicas", "by_stage"), [
    (7.5e9, 1, (120, 120, 120)), (7.5e9, 4, (52.5, 41.3, 30)), (7.5e9, 16, (35.6, 21.6, 7.5)),
    (7.5e9, 64, (31.4, 16.6, 1.88)), (7.5e9, 256, (30.4, 15.4, 0.47)), (7.5e9, 1024, (30.1, 15.1, 0.12)),
    (128e9, 64, (536, 284, 32)), (128e9, 1024, (513, 257, 2)),
    (1e12, 64, (4187, 2218, 250)), (1e12, 1024, (4011, 2013, 15.6)),
])  # fmt: skip
def test_zero_stages(size: float, replicas: int, by_stage: tuple[float, ...]) -> None:
    """Rajbhandari et al. 2020, table 1: GB of model states of a device, stages 1, 2 and 3."""
    for zero, gigabytes in enumerate(by_stage, 1):
        found = states(size, TrainingSetup(n_devices=replicas, zero=zero)).total / 1e9
        assert found == pytest.approx(gigabytes, rel=0.01, abs=0.02)
    assert states(size, TrainingSetup(n_devices=replicas, zero=0)).total == 16 * size, "16 bytes a parameter"


@pytest.mark.parametrize(("changes", "n_bytes", "of_optimizer"), [
    ({}, 16, 8), ({"gradient_bytes": 4}, 18, 8), ({"optimizer": "adam-bf16"}, 12, 4), ({"master_bytes": 0}, 12, 8),
    ({"optimizer": "adam-8bit"}, 10.00390625, 2.00390625), ({"optimizer": "sgd"}, 12, 4),
])  # fmt: skip
def test_bytes_of_a_parameter(changes: dict[str, object], n_bytes: float, of_optimizer: float) -> None:
    setup = TrainingSetup(n_devices=1, **changes)  # type: ignore[arg-type]
    found = states(1e9, setup)
    assert found.total == pytest.approx(1e9 * n_bytes)
    assert found.optimizer == pytest.approx(1e9 * of_optimizer)


@pytest.mark.parametrize("name", GPTS)
@pytest.mark.parametrize("tensor", [1, 8])
def test_activations_of_gpt(name: str, tensor: int) -> None:
    """Korthikanti et al. 2022, table 2: sbh (34 + 5as/h), (10 + 24/t + 5as/ht), (34 + 5as/h) / t, 34/t, 2, 2/t."""
    hidden, n_heads, _ = GPTS[name]
    layer, seq_len = gpt(name).layers[0], 2048
    scores = 5 * n_heads * seq_len / hidden

    def bytes_of(**changes: object) -> float:
        values = {"n_devices": 8, "tensor_parallel": tensor, "seq_len": seq_len, "stores_scores": True, "dropout": True}
        setup = TrainingSetup(**values | changes)  # type: ignore[arg-type]
        with_scores = setup.checkpointing is not SELECTIVE
        return kept_by_layer(layer, hidden, setup).on_device(setup, with_scores=with_scores) / hidden

    assert bytes_of() == pytest.approx((34 + scores) / tensor)
    assert bytes_of(sequence_parallel=False) == pytest.approx(10 + 24 / tensor + scores / tensor)
    assert bytes_of(checkpointing=SELECTIVE) == pytest.approx(34 / tensor)
    assert bytes_of(checkpointing=SELECTIVE, sequence_parallel=False) == pytest.approx(10 + 24 / tensor)


def test_scores_of_known_models() -> None:
    """Section 5 there: 5as/h is 80 for GPT-3 and 64 for MT-NLG; leaving it out saves 70 % and 65 %."""
    for name, part, saved in (("175B", 80, 0.70), ("530B", 64, 0.65)):
        hidden = GPTS[name][0]
        kept = kept_by_layer(gpt(name).layers[0], hidden, TrainingSetup(seq_len=2048, stores_scores=True, dropout=True))
        assert kept.scores / hidden == part
        assert kept.scores / (kept.whole + kept.divided) == pytest.approx(saved, abs=0.01)


def test_a_pipeline_holds_as_much_as_all_layers_of_one_micro_batch() -> None:
    """Section 4.2.3: the first stage keeps p micro-batches of L/p layers; the others one less each."""
    setup = TrainingSetup(
        n_devices=64, tensor_parallel=8, pipeline_parallel=8, seq_len=2048, batch_tokens=64 * 2048, stores_scores=True,
        dropout=True, checkpointing=SELECTIVE,
    )  # fmt: skip
    found = stage_activations(gpt("175B"), setup)
    expected = 34 * 12288 * 96 / 8 * 2048
    assert [one.layers for one in found] == pytest.approx([expected * (8 - stage) / 8 for stage in range(8)])
    assert found[0].ends == pytest.approx(8 * 12288 * 2048 / 8), "the mask of the embedding, of each micro-batch"
    assert found[7].ends == pytest.approx(4 * 12288 * (1 + 51200 / 12288) * 2048 / 8), "4sbh (1 + v/h) / t"
    full = stage_activations(gpt("175B"), msgspec.structs.replace(setup, checkpointing=FULL))
    assert full[0].layers == 2 * 12288 * 96 / 8 * 2048


def test_what_is_there_for_a_while() -> None:
    """The gradient of float32 logits, or the layer that is computed again, whichever is more."""
    small = stage_activations(LLAMA_8B, TrainingSetup(n_devices=1, batch_tokens=1, seq_len=1024))[0]
    assert small.working == 4 * LLAMA_8B.vocab_size * 1024
    setup = TrainingSetup(n_devices=1, batch_tokens=1, seq_len=1024)
    kept = kept_by_layer(LLAMA_2["70B"].layers[0], 8192, setup)
    assert stage_activations(LLAMA_2["70B"], setup)[0].working == 1024 * (kept.whole + kept.divided)
    none = msgspec.structs.replace(setup, checkpointing=NONE)
    assert stage_activations(LLAMA_2["70B"], none)[0].working == 4 * 32000 * 1024


def test_fewer_micro_batches_than_stages_fill_them_less() -> None:
    setup = TrainingSetup(n_devices=8, pipeline_parallel=8, seq_len=2048, batch_tokens=2 * 2048, checkpointing=FULL)
    found = [one.layers for one in stage_activations(gpt("175B"), setup)]
    assert setup.n_micro_batches == 2 and found[0] == found[6] == 2 * found[7]


def test_a_gated_feed_forward_with_grouped_heads() -> None:
    """Written out for Llama-2-70B: per token norms and inputs 4 x 2h, q and result 2 x 2h, k and v 2 x 2 x 1024,
    three inner vectors, and a logsumexp a head."""
    arch, hidden = LLAMA_2["70B"], 8192
    kept = kept_by_layer(arch.layers[0], hidden, TrainingSetup())
    assert kept.whole == 8 * hidden
    assert kept.divided == 4 * hidden + 4 * 1024 + 6 * 28672 + 4 * 64 and kept.scores == 4 * 64
    stored = kept_by_layer(arch.layers[0], hidden, TrainingSetup(stores_scores=True))
    assert stored.scores == 2 * 64 * 4096


def test_experts_keep_what_the_chosen_ones_compute() -> None:
    arch = MIXTURES["8x7B"]
    kept = kept_by_layer(arch.layers[0], 4096, TrainingSetup())
    attention = 4 * 4096 + 4 * 1024 + 4 * 32
    experts = 2 * 2 * (3 * 14336 + 2 * 4096) + 2 * 4 * 8
    assert kept.whole == 8 * 4096 and kept.divided == attention + experts


def test_latent_attention_keeps_heads_not_lines() -> None:
    arch = MIXTURES["671B"]
    kept = kept_by_layer(arch.layers[0], 7168, TrainingSetup())
    mixer = 2 * 1536 + 2 * 512 + 64 + 128 * (2 * 192 + 2 * 128)
    assert kept.divided == 2 * (mixer + 3 * 18432) + 4 * 128


@pytest.mark.parametrize("arch", [*LLAMA_2.values(), *MIXTURES.values(), LLAMA_8B, gpt("22B")])
def test_stages_have_all_parameters(arch: ModelArch) -> None:
    assert sum(stage_parameters(arch, 1, 1)) == arch.n_parameters
    copy = arch.vocab_size * arch.hidden_size if arch.tie_embeddings else 0
    assert sum(stage_parameters(arch, 1, 4)) == arch.n_parameters + copy
    halves = sum(stage_parameters(arch, 2, 1))
    assert arch.n_parameters / 2 < halves < 0.51 * arch.n_parameters, "norms are whole on every device"


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"12 devices cannot be divided.* take a multiple of 8"):
        TrainingSetup(n_devices=12, tensor_parallel=4, pipeline_parallel=2)
    with pytest.raises(ConfigError, match="64 query heads"):
        stage_parameters(LLAMA_2["70B"], 3, 1)
    with pytest.raises(ConfigError, match="'adamw' is unknown: choose one of adam"):
        TrainingSetup(optimizer="adamw")
