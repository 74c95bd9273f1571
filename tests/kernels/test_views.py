"""Parts of tensors as kernels get them share their memory, whatever the strides."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.decomposition.rectangles import Batch, Rectangle
from quorum_attention.kernels.views import jth_of_group, key_rows, query_rows, runs_as_batch

STORED = {
    "dense": lambda: torch.arange(240.0).view(1, 2, 30, 4),
    "token major": lambda: torch.arange(240.0).view(1, 30, 2, 4).transpose(1, 2),
    "a part": lambda: torch.arange(960.0).view(2, 4, 30, 4)[1:, 1:3],
}


@pytest.mark.parametrize("stored", list(STORED))
def test_regular_runs_are_batch_entries(stored: str) -> None:
    tensor = STORED[stored]()
    batch = Batch(Rectangle(2, 5, 1, 7, False), 4, query_step=7, key_step=6)
    rows, columns = query_rows(tensor, batch), key_rows(tensor, batch)
    assert rows.shape == (4, 2, 3, 4)
    assert columns.shape == (4, 2, 6, 4)
    for number, r in enumerate(batch.rectangles()):
        assert torch.equal(rows[number], tensor[0, :, r.query_start : r.query_stop])
        assert torch.equal(columns[number], tensor[0, :, r.key_start : r.key_stop])
    rows.zero_()
    assert tensor[0, :, 2:5].eq(0).all()


def test_one_run_keeps_its_batch() -> None:
    tensor = torch.arange(480.0).view(2, 2, 30, 4)
    one = Batch(Rectangle(3, 9, 0, 4, False))
    assert query_rows(tensor, one).data_ptr() == tensor[:, :, 3:].data_ptr()
    assert torch.equal(query_rows(tensor, one), tensor[:, :, 3:9])
    assert torch.equal(key_rows(tensor, one), tensor[:, :, :4])
    # Statistics have no last dimension.
    assert torch.equal(query_rows(tensor[..., 0], one), tensor[:, :, 3:9, 0])


def test_heads_of_a_group() -> None:
    tensor = torch.arange(6).view(1, 6, 1).expand(2, 6, 5)
    for j in range(3):
        found = jth_of_group(2, j, tensor)
        assert found[0, :, 0].tolist() == [j, 3 + j]


def test_parts_of_a_run_as_a_batch() -> None:
    tensor = torch.arange(24).view(1, 2, 12)
    found = runs_as_batch(3, tensor)
    assert found.shape == (3, 2, 4)
    for part in range(3):
        assert torch.equal(found[part], tensor[0, :, 4 * part : 4 * part + 4])
    assert found.data_ptr() == tensor.data_ptr()
