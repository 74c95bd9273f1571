"""A head group's part of a tensor: views, whatever the batch, of exactly that part."""

from __future__ import annotations

import pytest
import torch

from quorum_attention.execution.workload import (
    GroupSize,
    RowTensor,
    Workload,
    group_part,
    groups,
)

HEADS = {"query": 4, "key": 2}


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("size", [GroupSize(2, 2), GroupSize(1, 1), GroupSize(1, 2)])
@pytest.mark.parametrize("axis", ["query", "key"])
def test_groups_write_all_of_a_tensor_once(batch, size: GroupSize, axis) -> None:  # type: ignore[no-untyped-def]
    work = Workload(batch, 4, 2, 7, 7, 3, 3, torch.float32, False)
    tensor = torch.zeros(*batch, HEADS[axis], 7, 3)
    for group in groups(work, size):
        blocks = RowTensor(tensor, axis).blocks(group)
        assert len(blocks) == len(group.entries)
        for block in blocks:
            heads = group.key_heads if axis == "key" else group.query_heads
            assert block.shape == (heads.stop - heads.start, 7, 3)
            block += 1
    assert (tensor == 1).all()


@pytest.mark.parametrize("axis", ["query", "key"])
def test_a_buffer_holds_whichever_group_it_is(axis) -> None:  # type: ignore[no-untyped-def]
    """The last groups may be smaller: they use the front of the buffer."""
    work = Workload((3,), 6, 3, 7, 7, 3, 3, torch.float32, False)
    count = {"query": 4, "key": 2}[axis]
    buffer = torch.zeros(2, count, 7, 3)
    for size in (GroupSize(2, 2), GroupSize(1, 2)):
        for group in groups(work, size):
            blocks = RowTensor(buffer, axis, of_group=True).blocks(group)
            for entry, block in enumerate(blocks):
                heads = group.key_heads if axis == "key" else group.query_heads
                assert block.shape[0] == heads.stop - heads.start
                assert block.data_ptr() == buffer[entry].data_ptr()


def test_a_part_of_one_entry() -> None:
    work = Workload((2, 2), 4, 2, 7, 7, 3, 3, torch.float32, False)
    tensor = torch.randn(2, 2, 4, 7, 3)
    for group in groups(work, GroupSize(1, 1)):
        part = group_part(tensor, group, "query")
        assert part.shape == (1, 2, 7, 3)
        assert torch.equal(part[0], tensor[group.entries[0]][group.query_heads])
        assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert group_part(tensor[..., 0], group, "query").shape == (1, 2, 7)
