"""A head whose rows are divided among ranks gives every rank all logits, in one matrix or in the one that it is
given."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import ThreadComm, together

from quire.compute.layers.vocabulary import DividedHead


@pytest.mark.parametrize("n_ids, n_ranks", [(128, 2), (96, 4), (10, 2), (6, 2), (129, 2), (10, 4), (9, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_all_logits(n_ids: int, n_ranks: int, dtype: torch.dtype) -> None:
    """Numbers of ids that ranks share evenly and not, in rows of 8, 4 and 2 bytes; into rows of another type, and of a
    wider matrix."""
    width = -(-n_ids // n_ranks)
    for n_rows in (0, 1, 5):
        x = torch.randn(n_rows, n_ids, generator=torch.Generator().manual_seed(n_rows)).to(dtype)

        def live(comm: ThreadComm, x: torch.Tensor = x) -> list[torch.Tensor]:
            own = slice(comm.rank * width, min(n_ids, (comm.rank + 1) * width))
            head = DividedHead(lambda x, norm: x[:, own], n_ids, comm)  # type: ignore[arg-type]
            outs = torch.empty_like(x), torch.empty(x.shape), torch.empty(len(x), n_ids + 3, dtype=dtype)[:, :n_ids]
            found = [head(x), *(head(x, out=out) for out in outs)]
            assert all(one is out for one, out in zip(found[1:], outs, strict=True))
            return found

        for found in together(n_ranks, live):
            assert [one.dtype for one in found] == [dtype, dtype, torch.float32, dtype]
            assert all(torch.equal(one.to(dtype), x) for one in found)
