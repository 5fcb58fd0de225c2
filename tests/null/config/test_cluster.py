"""Options of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cli.command import run
from quire.config.cluster import ClusterConfig
from quire.core.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": -1}, "replicas"),
        ({"ray_actor_options": {"num_gpu": 1}}, "num_gpus"),
        ({"ray_actor_options": {"num_gpus": -1}}, "num_gpus = -1"),
        ({"ray_actor_options": {"num_cpus": "two"}}, "num_cpus = 'two'"),
        ({"ray_actor_options": {"resources": ["x"]}}, "resources"),
        ({"ray_actor_options": {"resources": {"x": None}}}, "resources: x"),
        ({"autoscaling_config": {"max_replica": 3}}, "max_replicas"),
        ({"autoscaling_config": {"max_replicas": 0}}, "max_replicas = 0"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas = 3"),
        ({"autoscaling_config": {"initial_replicas": 5, "max_replicas": 4}}, "initial_replicas = 5"),
        ({"autoscaling_config": {"max_replicas": 2}, "replicas": 2}, "both"),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas = 3, max_replicas = 2: each"),
        ({"autoscaling_config": {"target_ongoing_requests": 0}}, "target_ongoing_requests = 0 must be .* above 0"),
        ({"autoscaling_config": {"target_ongoing_requests": "x"}}, "target_ongoing_requests = 'x' must be a number"),
        ({"autoscaling_config": {"downscale_delay_s": -1}}, "downscale_delay_s = -1 must be a number from 0 up"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClusterConfig(**options).verify()


def test_what_is_needed_at_first() -> None:
    assert ClusterConfig(replicas=3).n_at_start == 3
    scaling = {"min_replicas": 1, "max_replicas": 4}
    assert ClusterConfig(autoscaling_config=scaling).n_at_start == 1
    assert ClusterConfig(autoscaling_config=scaling | {"initial_replicas": 2}).n_at_start == 2


def test_ray_is_used_when_it_is_asked_for() -> None:
    assert not ClusterConfig().is_used
    assert ClusterConfig(replicas=2).is_used
    assert ClusterConfig(ray_address="auto").is_used
    assert ClusterConfig(autoscaling_config={"max_replicas": 2}).is_used


def test_what_only_replicas_have_is_refused_where_there_are_none() -> None:
    room = {"num_gpus": 1}
    with pytest.raises(ConfigError, match=r"ray_actor_options = .*num_gpus.* and replicas = 1: .* give --replicas"):
        ClusterConfig(ray_actor_options=room).check_used()
    ClusterConfig(ray_actor_options=room, replicas=2).check_used()
    ClusterConfig().check_used()


@pytest.mark.parametrize("value", ["0", "-2", "many"])
def test_the_flag_says_its_limit(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["serve", "--replicas", value])
    assert caught.value.code == 2
    assert "--replicas" in capsys.readouterr().err
