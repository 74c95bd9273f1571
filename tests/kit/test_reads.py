"""What a mask reads: another key when numbers or tensors it closes over have changed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from quorum_attention.decomposition import Ranges
from quorum_attention.kernels.kit import document, sliding_window
from quorum_attention.kernels.kit.reads import codes, reads, settled


def made(kind: str):  # type: ignore[no-untyped-def]
    """(function, what changes what it reads)."""
    table, state = torch.ones(5), {"w": 3, "more": [1]}
    width = 3

    def closure(b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < width

    def widen() -> None:
        nonlocal width
        width = 4

    def other() -> None:
        nonlocal table
        table = torch.ones(5)

    def by_table(b, h, q, k):  # type: ignore[no-untyped-def]
        return table[q] > 0

    masks = pytest.importorskip("torch.nn.attention.flex_attention")
    return {
        "a number": (closure, widen),
        "a tensor written to": (by_table, lambda: table.mul_(2)),
        "another tensor": (by_table, other),
        "numbers by NumPy": (by_table, lambda: table.numpy().fill(3)),
        "numbers by .data": (by_table, lambda: table.data.fill_(3)),
        "another's memory": (by_table, lambda: setattr(table, "data", torch.zeros(5))),
        "a dictionary": (lambda b, h, q, k: q < state["w"], lambda: state.update(w=4)),
        "a list in it": (lambda b, h, q, k: q < state["w"], lambda: state["more"].append(2)),
        "within another": ((lambda f: lambda b, h, q, k: f(b, h, q, k))(closure), widen),
        "joined by torch": (masks.and_masks(closure, lambda b, h, q, k: q >= k), widen),
    }[kind]


@pytest.mark.parametrize("kind", [
    "a number", "a tensor written to", "another tensor", "another's memory", "a dictionary",
    "a list in it", "within another", "joined by torch", "numbers by NumPy", "numbers by .data",
])  # fmt: skip
def test_a_change_is_seen(kind: str) -> None:
    function, change = made(kind)
    before = reads(function)
    assert reads(function) == before
    assert hash(reads(function)) == hash(before)
    change()
    assert reads(function) != before


@pytest.mark.parametrize(
    "kind", ["a number", "a tensor written to", "a list in it", "within another"]
)
def test_what_is_settled_is_seen_to_change(kind: str) -> None:
    function, change = made(kind)
    before = settled([function])
    assert before is not None
    assert settled([function]) == before
    assert hash(settled([function])) == hash(before)
    change()
    assert settled([function]) != before


LIMIT = 5


def below(q):  # type: ignore[no-untyped-def]
    return q < LIMIT


def test_globals_are_settled_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [
        lambda b, h, q, k: q < LIMIT,
        lambda b, h, q, k: torch.where(below(q), True, False),
    ]
    before = [settled([one]) for one in functions]
    assert None not in before
    monkeypatch.setitem(globals(), "LIMIT", 6)
    for one, old in zip(functions, before, strict=True):
        assert settled([one]) != old


class Holder:
    """Whose attributes nobody sees change."""

    limit = 3

    def keeps(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return q < self.limit


def test_what_cannot_be_seen_is_not_settled() -> None:
    held, deep = Holder(), list(range(1000))
    for one in (
        held.keeps, lambda b, h, q, k: q < held.limit, lambda b, h, q, k: q < deep[0],
        torch.nn.Identity(),
    ):  # fmt: skip
        assert settled([one]) is None
    assert settled([document(torch.arange(3))]) is not None


def test_a_document_has_ids_of_its_own() -> None:
    ids = torch.arange(6) // 2
    mask = document(ids)
    ids.zero_()
    q, k = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])
    assert mask(0, 0, q, k).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="ids of 6 tokens"):
        mask.verdict(Ranges.of(0, 10, 0, 10))


def test_a_key_keeps_nothing() -> None:
    table = torch.ones(1000)
    gone = weakref.ref(table)
    key = reads(lambda b, h, q, k, t=table: t[q])
    del table
    gc.collect()
    assert gone() is None
    assert hash(key)


def test_the_same_code_for_other_numbers() -> None:
    assert codes(sliding_window(3)) == codes(sliding_window(4))
    assert codes(sliding_window(3)) != codes(document(torch.arange(3)))
    assert codes(None) == ()
    assert codes(torch.nn.Identity()) == (torch.nn.Identity,)


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

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return held

    key = reads(mask)
    assert key == reads(mask)
    assert hash(key) == hash(reads(mask))
    assert len(key) <= 256  # type: ignore[arg-type]
