"""Memory that processes share, sent to a GPU from where it lies."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest
import torch

from quire.compute.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def shared(n_rows: int, n_words: int) -> np.ndarray:
    descriptor = os.memfd_create("quire-test")
    os.ftruncate(descriptor, 4 * n_rows * n_words)
    memory = np.frombuffer(mmap.mmap(descriptor, 4 * n_rows * n_words), "<i4").reshape(n_rows, n_words)
    os.close(descriptor)
    return memory


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_is_sent_arrives(is_pinned: bool) -> None:
    device, memory = CudaDevice(), shared(300, 4739)
    if is_pinned:
        device.pin(memory)
        assert device._pinned, "the driver refuses: masks are copied twice on this machine"
    target = device.zeros((512, 4748), torch.int32)
    for seed in range(20):
        n = 1 + 13 * seed
        memory[:n] = np.random.default_rng(seed).integers(-(2**31), 2**31, (n, 4739), np.int64)
        expected = memory[:n].copy()
        device.send(memory[:n], target[:n, :4739])
        device.synchronize()
        memory[:n] = 0
        assert (target[:n, :4739].cpu().numpy() == expected).all() and not target[:, 4739:].any()


def test_memory_is_given_back_with_the_device() -> None:
    """The same place can be pinned again; a refusal leaves no error behind."""
    memory = shared(8, 1024)
    for _ in range(2):
        device = CudaDevice()
        device.pin(memory)
        assert device._pinned
        device.pin(memory)  # it is pinned: refused
        assert len(device._pinned) == 1 and int(device.zeros((4,), torch.int32).sum()) == 0
        del device
        gc.collect()
