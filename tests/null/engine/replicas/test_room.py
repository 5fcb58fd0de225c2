"""Whether a cluster has room for replicas."""

from __future__ import annotations

import pytest

from quire.core.errors import ConfigError
from quire.engine.replicas.room import check_room, idle_gpus, n_places, n_spread, needs_of

NODES = [{"CPU": 8.0, "GPU": 2.0, "memory": 1e9}, {"CPU": 3.0, "GPU": 1.0}]


def test_a_replica_lies_on_one_node() -> None:
    assert n_places(NODES, {"GPU": 1.0}) == 3
    assert n_places(NODES, {"GPU": 2.0}) == 1
    assert n_places(NODES, {"GPU": 0.5, "CPU": 3.0}) == 3
    assert n_places(NODES, {"memory": 5e8}) == 2
    assert n_places([{"CPU": 0.3}], {"CPU": 0.1}) == 3  # in binary 0.3 is less than three times 0.1


def test_one_cpu_is_the_default() -> None:
    assert needs_of({}) == {"CPU": 1.0}
    assert needs_of({"num_gpus": 1, "resources": {"big": 2}}) == {"CPU": 1.0, "GPU": 1.0, "big": 2.0}
    assert needs_of({"num_cpus": 0, "num_gpus": 0}) == {}
    check_room(1000, {"num_cpus": 0}, NODES)


def test_what_ray_has_is_said() -> None:
    check_room(3, {"num_gpus": 1}, NODES)
    with pytest.raises(ConfigError) as caught:
        check_room(4, {"num_gpus": 1}, NODES)
    message = caught.value.message
    assert "4 replicas need 1 CPU, 1 GPU each, and Ray has room for 3" in message
    assert "2 nodes have 8 CPU, 2 GPU; 3 CPU, 1 GPU" in message
    with pytest.raises(ConfigError, match=r"1 replica needs 1 CPU, 1 green each.*room for 0: its 0 nodes have no node"):
        check_room(1, {"resources": {"green": 1}}, [])


def test_a_replica_of_several_nodes_has_one_place_on_each() -> None:
    gpu = {"GPU": 1.0}
    assert n_spread(2, NODES, gpu, 2) == 1, "the second node has one GPU"
    assert n_spread(5, [{"GPU": 2.0}] * 3, gpu, 2) == 3
    assert n_spread(5, [{"GPU": 9.0}], gpu, 2) == 0
    check_room(1, {"num_gpus": 1}, NODES, 2)
    with pytest.raises(ConfigError, match="2 replicas need 1 CPU, 1 GPU on each of 2 nodes, and Ray has room for 1"):
        check_room(2, {"num_gpus": 1}, NODES, 2)


def test_gpus_that_no_replica_would_get_are_told() -> None:
    told = idle_gpus({"num_cpus": 4}, NODES)
    assert "3 GPUs" in told and "computes on the CPU" in told and '{"num_gpus": 1}' in told
    assert idle_gpus({"num_gpus": 1}, NODES) == idle_gpus({"num_gpus": 0}, NODES) == "", "it was said"
    assert idle_gpus({}, [{"CPU": 8.0}]) == "", "there are none"
