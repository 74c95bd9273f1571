"""What a user's function reads: another key when that has changed, the same when it has not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from quorum_attention.kernels.kit import document, sliding_window
from quorum_attention.kernels.kit.reads import codes, reads

WIDTH = 3


class Owner:
    def __init__(self) -> None:
        self.width = 3

    def keeps(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < self.width

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return self.keeps(b, h, q, k)


def by_global(b, h, q, k):  # type: ignore[no-untyped-def]
    return (lambda: q - k < WIDTH)()


def made(kind: str):  # type: ignore[no-untyped-def]
    """(function, what changes what it reads)."""
    owner, table, state = Owner(), torch.ones(5), {"w": 3, "more": [1]}
    array = np.ones(5)
    width = 3

    def closure(b, h, q, k):  # type: ignore[no-untyped-def]
        return q - k < width

    def widen() -> None:
        nonlocal width
        width = 4

    return {
        "a number": (closure, widen),
        "a tensor": (lambda b, h, q, k: table[q] > 0, lambda: table.mul_(2)),
        "an array": (lambda b, h, q, k: array[q] > 0, lambda: array.__setitem__(0, 7)),
        "a dictionary": (lambda b, h, q, k: q < state["w"], lambda: state.update(w=4)),
        "a list in it": (lambda b, h, q, k: q < state["w"], lambda: state["more"].append(2)),
        "a method": (owner.keeps, lambda: setattr(owner, "width", 4)),
        "an object": (owner, lambda: setattr(owner, "width", 4)),
        "a partial": (functools.partial(owner.keeps, 0), lambda: setattr(owner, "width", 4)),
        "within another": (
            (lambda inner: lambda b, h, q, k: inner(b, h, q, k))(closure), widen,
        ),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", [
    "a number", "a tensor", "an array", "a dictionary", "a list in it", "a method", "an object",
    "a partial", "within another",
])  # fmt: skip
def test_a_change_is_seen(kind: str) -> None:
    function, change = made(kind)
    before = reads(function)
    assert reads(function) == before
    assert hash(reads(function)) == hash(before)
    change()
    assert reads(function) != before


def test_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reads(by_global)
    monkeypatch.setitem(globals(), "WIDTH", 4)
    assert reads(by_global) != before


def test_masks_of_the_kit() -> None:
    assert reads(sliding_window(3)) == reads(sliding_window(3))
    assert reads(sliding_window(3)) != reads(sliding_window(4))
    ids = torch.arange(6) // 2
    mask = document(ids)
    before = reads(mask)
    # It has a copy of its own: nothing that is done to the ids changes it.
    ids.zero_()
    assert reads(mask) == before
    q, k = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 5])
    assert mask(0, 0, q, k).tolist() == [True, False, True]


def test_the_same_code_for_other_numbers() -> None:
    assert codes(sliding_window(3)) == codes(sliding_window(4))
    assert codes(sliding_window(3)) != codes(document(torch.arange(3)))
    assert codes(None) == ()


def test_what_refers_to_itself_ends() -> None:
    state: dict[str, object] = {}
    state["self"] = state
    assert reads(lambda b, h, q, k: state)
