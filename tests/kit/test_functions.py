"""What functions are seen to read: tensors that autograd saves, and keys of tables of blocks."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quorum_attention.decomposition import Ranges
from quorum_attention.kernels.kit import document, sliding_window
from quorum_attention.kernels.masked.functions import codes, tensors, versions

Rule = Callable[..., torch.Tensor]


class Holder:
    """Keeps what its attributes say, in two ways."""

    def __init__(self) -> None:
        self.ids, self.width, self.beside = torch.arange(9) // 2, 5, torch.zeros(1)

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (self.ids[q] == self.ids[k]) | (q - k < self.width)

    def by_method(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self(b, h, q, k)


def _given(n: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.as_tensor(k < n)


def test_tensors_are_found_and_one_that_is_written_to_is_another_key() -> None:
    table, thing, layer = torch.ones(5), Holder(), torch.nn.Module()
    layer.slopes = torch.nn.Module()
    layer.slopes.values = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    within = (lambda f: lambda b, h, q, k: f(b, h, q, k))(lambda b, h, q, k: table[q] > 0)
    for function, tensor in (
        (within, table),
        (partial(_given, table), table),
        (partial(_given, OrderedDict(n=deque([table]))), table),
        (lambda b, h, q, k: layer.slopes.values[h] > 0, layer.slopes.values),
        (lambda b, h, q, k, t=table: t[q] > 0, table),
        (thing, thing.ids),
        (thing.by_method, thing.ids),
    ):
        assert [t is tensor for t in tensors([function])] == [True]
        before = versions(function)
        assert versions(function) == before
        assert hash(versions(function)) == hash(before)
        tensor.mul_(2)
        assert versions(function) != before
    before = versions(within)
    table.data = torch.zeros(5)
    assert versions(within) != before


def test_tensors_are_not_kept_alive() -> None:
    def rule_of(table: torch.Tensor) -> Rule:
        return lambda b, h, q, k: table[q] > 0

    table = torch.arange(3)
    rule, gone = rule_of(table), weakref.ref(table)
    key = versions(rule)
    rule.__closure__[0].cell_contents = None  # type: ignore[attr-defined]
    del table
    gc.collect()
    assert gone() is None
    assert versions(rule) != key


def test_a_document_has_ids_of_its_own() -> None:
    ids = torch.arange(6) // 2
    mask = document(ids)
    ids.zero_()
    q, k = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])
    assert mask(0, 0, q, k).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="ids of 6 tokens"):
        mask.verdict(Ranges.of(0, 10, 0, 10))


def test_masks_made_again_have_the_same_code() -> None:
    cpu = torch.device("cpu")
    window, other, ids = (
        codes(mask.mask_mod(cpu))
        for mask in (sliding_window(4), sliding_window(5), document(torch.arange(3)))
    )
    assert window == other
    assert window != ids
