"""Host arrays on their way to a device: also those that may not be written."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from quire.kernels.transfer import upload, write

CPU = torch.device("cpu")


def test_arrays_that_may_not_be_written_are_copied_without_a_warning() -> None:
    fixed = np.frombuffer(np.arange(6, dtype=np.int32).tobytes(), np.int32).reshape(2, 3)
    target = torch.full((8,), 9, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = upload(fixed, CPU)
        write(fixed, target)
    found += 1
    assert fixed.ravel().tolist() == [0, 1, 2, 3, 4, 5] and target.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_, np.uint8])
def test_others_are_as_they_were(dtype: type) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    for one in (array, array[:, ::2]):
        found = upload(one, CPU)
        assert found.shape == one.shape and found.tolist() == one.tolist() and found.is_contiguous()
