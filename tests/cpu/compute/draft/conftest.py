"""A model with a head, and engines on a device whose graphs are calls."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import head_case
import pytest
import torch
from calling_device import CallingDevice, LiveChains, LivePlans
from family_cases import random_checkpoint

from quire.compute import platform
from quire.compute.platform import CudaPlatform
from quire.engine import workers


@pytest.fixture(scope="module")
def model_with_head(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Its folder; the head's is in it."""
    found = tmp_path_factory.mktemp("model")
    random_checkpoint(found, "Llama", num_hidden_layers=4, max_position_embeddings=256)
    head_case.write(found / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    return found


@pytest.fixture
def captured_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines have a captured device apart."""
    n_threads = torch.get_num_threads()
    LivePlans(monkeypatch)
    LiveChains(monkeypatch)
    monkeypatch.setattr(platform.cuda, "CudaDevice", CallingDevice)
    monkeypatch.setattr(workers, "platform_of", lambda config, rank: CudaPlatform())
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
