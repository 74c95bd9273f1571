"""Copies into the layout that an operator takes for granted, and none where it is there."""

from __future__ import annotations

import torch

from quorum_attention.kernels.layouts import in_layout_of, token_major, zero_unit_strides


def test_dimensions_nested_as_the_models() -> None:
    query = torch.randn(2, 5, 3, 4).transpose(1, 2)  # token-major (b, h, n, d)
    other = torch.randn(2, 3, 5, 6)
    copy = in_layout_of(other, query)
    assert torch.equal(copy, other)
    assert copy.stride() == torch.randn(2, 5, 3, 6).transpose(1, 2).stride()
    assert in_layout_of(copy, query) is copy
    assert in_layout_of(other, other) is other
    # What torch allocates for an output of that query.
    assert in_layout_of(query[..., :1], query).stride()[:3] == (15, 1, 3)


def test_token_major() -> None:
    other = torch.randn(2, 3, 5, 6)
    found = token_major(other)
    assert found.stride() == (90, 6, 18, 1)
    assert torch.equal(found, other)
    assert token_major(found).data_ptr() == found.data_ptr()


def test_strides_of_single_elements_are_none() -> None:
    unit = torch.randn(1, 3, 1, 4)
    assert zero_unit_strides(unit).stride() == (0, 4, 0, 1)
    assert torch.equal(zero_unit_strides(unit), unit)
