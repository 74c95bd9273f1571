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
from torch.nn.attention.flex_attention import and_masks

from quorum_attention.decomposition import Ranges
from quorum_attention.kernels.kit import document, sliding_window
from quorum_attention.kernels.kit.functions import codes, tensors, versions

Rule = Callable[..., torch.Tensor]
LIMIT = 5


class Holder:
    """Keeps what its attributes say, in two ways."""

    def __init__(self) -> None:
        self.ids, self.width, self.beside = torch.arange(9) // 2, 5, torch.zeros(1)

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (self.ids[q] == self.ids[k]) | (q - k < self.width)

    def by_method(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self(b, h, q, k)


def by_global(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.as_tensor(q < LIMIT)


def _given(n: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.as_tensor(k < n)


def _changed(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[], Any]]:
    """(function, what changes what it reads)."""
    table, state, width, thing = torch.ones(5), {"w": 3, "more": [1]}, 3, Holder()
    layer = torch.nn.Module()
    layer.slopes = torch.nn.Module()
    layer.slopes.values = torch.nn.Parameter(torch.ones(5))

    def closure(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < width

    def widen() -> None:
        nonlocal width
        width = 4

    def other() -> None:
        nonlocal table
        table = torch.ones(5)

    def by_table(b: Any, h: Any, q: Any, k: Any) -> Any:
        return table[q] > 0

    def wider() -> None:
        thing.width = 6

    def new_ids() -> None:
        thing.ids = torch.arange(9)

    return {
        "a number": (closure, widen),
        "a tensor written to": (by_table, lambda: table.mul_(2)),
        "another tensor": (by_table, other),
        "another's memory": (by_table, lambda: setattr(table, "data", torch.zeros(5))),
        "a dictionary": (lambda b, h, q, k: q < state["w"], lambda: state.update(w=4)),
        "a list in it": (
            lambda b, h, q, k: q < state["w"], lambda: state["more"].append(2),  # type: ignore[attr-defined]
        ),
        "within another": ((lambda f: lambda b, h, q, k: f(b, h, q, k))(closure), widen),
        "joined by torch": (and_masks(closure, by_global), widen),
        "a global": (by_global, lambda: monkeypatch.setitem(globals(), "LIMIT", 6)),
        "an attribute": (lambda b, h, q, k: q - k < thing.width, wider),
        "an object's number": (thing, wider),
        "an object's tensor": (thing, new_ids),
        "a method's object": (thing.by_method, wider),
        "a partial function": (partial(_given, table), lambda: table.mul_(2)),
        "an ordered dictionary": (
            partial(lambda s, b, h, q, k: k < s["n"], held := OrderedDict(n=1)),
            lambda: held.update(n=2),
        ),
        "a deque": (partial(lambda s, b, h, q, k: k < s[0], line := deque([1])), lambda: line.append(2)),  # noqa: E501
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", [
    "a number", "a tensor written to", "another tensor", "another's memory", "a dictionary",
    "a list in it", "within another", "joined by torch", "a global", "an attribute",
    "an object's number", "an object's tensor", "a method's object", "a partial function",
    "an ordered dictionary", "a deque",
])  # fmt: skip
def test_a_change_is_another_key(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, change = _changed(kind, monkeypatch)
    before = versions(function)
    assert versions(function) == before
    assert hash(versions(function)) == hash(before)
    change()
    assert versions(function) != before


def test_tensors_are_found_by_closures_and_by_names() -> None:
    thing, layer, table = Holder(), torch.nn.Module(), torch.ones(3)
    layer.slopes = torch.nn.Module()
    layer.slopes.values = torch.nn.Parameter(torch.ones(5))
    for function, found in (
        (lambda b, h, q, k: layer.slopes.values[h] > 0, layer.slopes.values),
        (thing, thing.ids),
        (thing.by_method, thing.ids),
        (partial(_given, table), table),
        (lambda b, h, q, k, t=table: t[q] > 0, table),
    ):
        assert [t is found for t in tensors([function])] == [True]
    assert tensors([thing], named=False) == []


def test_a_function_that_reads_itself_is_read_once() -> None:
    table = torch.arange(3)

    def rule(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return rule(b, h, q, k) if table is None else table[q] > 0

    assert [t is table for t in tensors([rule, rule])] == [True]


def test_numbers_that_are_none_are_the_same_again() -> None:
    nan, thing = float("nan"), object()
    rule = lambda b, h, q, k: (q < nan) | (thing is None)  # noqa: E731
    assert versions(rule, None, max) == versions(rule, None, max)


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


@pytest.mark.parametrize("kind", ["itself", "long", "deep", "no hash"])
def test_whatever_is_closed_over(kind: str) -> None:
    """Nothing that a function may hold is too much, or too strange."""

    class NoHash(int):
        __hash__ = None  # type: ignore[assignment]

    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    itself: dict[str, object] = {}
    itself["self"] = itself
    held = {"itself": itself, "long": list(range(10**6)), "deep": deep, "no hash": NoHash(3)}[kind]
    function = lambda b, h, q, k: held  # noqa: E731
    key = versions(function)
    assert key == versions(function)
    assert hash(key) == hash(versions(function))
    assert len(key) <= 256  # type: ignore[arg-type]


def test_a_document_has_ids_of_its_own() -> None:
    ids = torch.arange(6) // 2
    mask = document(ids)
    ids.zero_()
    q, k = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])
    assert mask(0, 0, q, k).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="ids of 6 tokens"):
        mask.verdict(Ranges.of(0, 10, 0, 10))


def test_masks_made_again_have_the_same_code() -> None:
    assert codes(sliding_window(4)) == codes(sliding_window(5))
    assert codes(sliding_window(4)) != codes(document(torch.arange(3)))
    assert codes(None) == ()
