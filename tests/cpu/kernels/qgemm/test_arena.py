"""Memory of packed weights: pieces apart from one another, aligned, and alive as long as a tensor in them."""

from __future__ import annotations

import torch

from quire.kernels.qgemm.arena import ALIGNMENT, CHUNK_BYTES, HUGE_PAGE, Arena


def test_pieces_are_apart_and_aligned() -> None:
    own = Arena()
    shapes = [((3, 5), torch.bfloat16), ((7,), torch.uint8), ((0, 4), torch.float32), ((1 << 20,), torch.float32)]
    tensors = [own.empty(*each) for each in shapes for _ in range(20)]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(i % 200)
    for i, tensor in enumerate(tensors):
        assert bool((tensor == i % 200).all()), i


def test_larger_than_a_chunk_and_outlives_the_arena() -> None:
    own = Arena()
    small, large = own.empty((10,), torch.int32), own.empty((CHUNK_BYTES + 1,), torch.uint8)
    assert large.data_ptr() % HUGE_PAGE == 0
    small.fill_(5)
    large[-1] = 9
    del own
    torch.ones(1 << 20)
    assert small.tolist() == [5] * 10
    assert int(large[-1]) == 9
