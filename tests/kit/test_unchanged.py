"""What a function depends on is noticed where it changes between a forward and its backward: the
gradients would be of another attention, without a word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.kernels.kit.unchanged import Unchanged, tensors

Rule = Callable[..., torch.Tensor]
N = 40
width = 5


class Window:
    """Keeps what its attributes say, in three ways."""

    def __init__(self) -> None:
        self.ids, self.width, self.called, self.beside = torch.arange(N) // 7, 5, 0, 1

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        self.called += 1
        return (self.ids[q] == self.ids[k]) | (q - k < self.width)

    def by_method(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self(b, h, q, k) | (q - k < self.width)


def by_global(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return (q - k < width) | (q == k)


def _given(n: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return (k < n) | (k == q)


def _as_ours(rule: Rule) -> Rule:
    def handed_on(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return rule(b, h, q, k)

    handed_on.__module__ = "quorum_attention.made_up"
    return handed_on


def made(kind: str) -> tuple[Rule, Callable[[], Any]]:
    """A rule, and what changes what it reads."""
    n, ids, state, thing = 5, torch.arange(N) // 9, {"n": [4]}, Window()

    def closed(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (k < n) | (ids[k] == ids[q])

    def number() -> None:
        nonlocal n
        n = 7

    def tensor() -> None:
        nonlocal ids
        ids = torch.arange(N) // 2

    def widen() -> None:
        global width
        width += 1

    return {
        "a number": (closed, number),
        "another tensor": (closed, tensor),
        "within another": (lambda b, h, q, k: closed(b, h, q, k), number),
        "a global": (by_global, widen),
        "joined by torch": (and_masks(by_global, closed), number),
        "handed on by ours": (_as_ours(closed), tensor),
        "a list in a dictionary": (
            lambda b, h, q, k: q - k < state["n"][0], lambda: state["n"].__setitem__(0, 6),
        ),
        "an attribute": (
            lambda b, h, q, k: q - k < thing.width, lambda: setattr(thing, "width", 6),
        ),
        "an object's number": (thing, lambda: setattr(thing, "width", 6)),
        "an object's tensor": (thing, lambda: setattr(thing, "ids", torch.arange(N))),
        "a method's object": (thing.by_method, lambda: setattr(thing, "width", 6)),
        "in a partial function": (partial(_given, state["n"][0]), lambda: None),
        "in a partial function's list": (
            partial(lambda s, b, h, q, k: k < s["n"][0], state),
            lambda: state["n"].__setitem__(0, 6),
        ),
    }[kind]  # fmt: skip


CHANGES = [
    "joined by torch", "handed on by ours", "a number", "another tensor",
    "within another", "a global", "a list in a dictionary",
    "an attribute", "an object's number", "an object's tensor", "a method's object",
    "in a partial function's list",
]  # fmt: skip


def three() -> list[torch.Tensor]:
    return [torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_change_before_the_backward_is_an_error(kind: str, depth: int) -> None:
    rule, change = made(kind)
    given = three()
    out = qa.attention(*given, attn_mask=Mask(causal=True) & Mask(keeps=rule), depth=depth)
    out.sum().backward(retain_graph=True)
    change()
    with pytest.raises(RuntimeError, match="changed between the forward and its backward"):
        out.sum().backward()


@pytest.mark.parametrize("what", ["mask_mod", "score_mod"])
def test_so_it_is_for_functions_of_a_kernel(what: str) -> None:
    n = 5

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return (k < n) | (k == q)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        changed: torch.Tensor = s - (q - k).abs() / n
        return changed

    given = {"mask_mod": mask_mod, "score_mod": score_mod}[what]
    kernel = qa.from_score_mod(**{what: given}, compiled=False)  # type: ignore[arg-type]
    out = qa.attention(*three(), kernel=kernel)
    n = 6
    with pytest.raises(RuntimeError, match="n has changed between the forward"):
        out.sum().backward()


@pytest.mark.parametrize("of", ["score_mod", "function"])
def test_a_gradient_that_a_function_would_lose_is_refused(of: str) -> None:
    """Of a tensor that it reads; which pairs a mask keeps has none to lose."""
    slopes, (q, k, v) = torch.rand(2, requires_grad=True), three()

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        moved: torch.Tensor = s - slopes[h] * (q - k).abs()
        return moved

    def function(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        s = scale * query @ key.mT * slopes[0]
        return s.softmax(-1) @ value, s.logsumexp(-1)

    kernel: Any = qa.from_lse_function(function)
    if of == "score_mod":
        kernel = qa.from_score_mod(score_mod, compiled=False)
    for given in ((q, k, v), (q.detach(), k.detach(), v.detach())):
        with pytest.raises(NotImplementedError, match="no gradient of tensors that its functions"):
            qa.attention(*given, kernel=kernel)
    with torch.no_grad():
        qa.attention(q, k, v, kernel=kernel)
    slopes.requires_grad_(False)
    qa.attention(q, k, v, kernel=kernel).sum().backward()
    slopes.requires_grad_()
    kept = qa.from_score_mod(mask_mod=lambda b, h, i, j: (slopes[h] > 0) | (i >= j), compiled=False)
    qa.attention(q, k, v, kernel=kept).sum().backward()
    qa.attention(q, k, v, attn_mask=Mask(keeps=kept.mask_mod)).sum().backward()


def test_a_loop_over_rules_that_close_over_its_variable() -> None:
    """As it is written down first; with values of its own each backward is right."""
    q, k, v = three()
    shared, own = [], []
    for n in (3, 11, 20):
        shared.append(qa.attention(q, k, v, attn_mask=Mask(keeps=lambda b, h, i, j: j < n)))  # noqa: B023
        own.append(qa.attention(q, k, v, attn_mask=Mask(keeps=lambda b, h, i, j, n=n: j < n)))
    with pytest.raises(RuntimeError, match="n has changed"):
        sum(shared).sum().backward()  # type: ignore[union-attr]
    found = torch.autograd.grad(sum(own).sum(), [q, k, v])  # type: ignore[union-attr]
    lengths = [Mask(key_lengths=torch.tensor([n])) for n in (3, 11, 20)]
    plain = torch.stack([qa.attention(q, k, v, attn_mask=mask) for mask in lengths])
    for got, want in zip(found, torch.autograd.grad(plain.sum(), [q, k, v]), strict=True):
        assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("where", ["an object", "a method", "a partial function", "a global"])
def test_tensors_written_to_are_torchs_error_wherever_they_are_kept(where: str) -> None:
    thing = Window()
    rules: dict[str, Rule] = {
        "an object": thing,
        "a method": thing.by_method,
        "a partial function": partial(lambda t, b, h, q, k: t[q] == t[k], thing.ids),
        "a global": _reads_table,
    }
    out = qa.attention(*three(), attn_mask=Mask(keeps=rules[where]))
    (TABLE if where == "a global" else thing.ids).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


TABLE = torch.arange(N) // 4


def _reads_table(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return TABLE[q] == TABLE[k]


def test_what_a_function_writes_or_does_not_read_may_change() -> None:
    thing, calls, count, unread = Window(), [0], 0, 5

    def rule(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        calls.append(count)
        thing.called += 1
        return thing(b, h, q, k) | (q == k)

    out = qa.attention(*three(), attn_mask=Mask(keeps=rule))
    thing.beside, unread = 9, 6
    out.sum().backward()
    assert count > 1
    assert unread == 6


def test_numbers_that_are_none_and_objects_of_no_kind_are_the_same_again() -> None:
    nan, thing = float("nan"), object()
    seen = Unchanged([lambda b, h, q, k: (q < nan) | (thing is None), None, max])
    seen.check()


def test_a_function_that_reads_itself_is_read_once() -> None:
    table = torch.arange(3)

    def rule(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return rule(b, h, q, k) if table is None else table[q] > 0

    assert [t is table for t in tensors([rule, rule])] == [True]
    Unchanged([rule]).check()


def test_tensors_are_not_kept_alive() -> None:
    import gc
    import weakref

    def rule_of(table: torch.Tensor) -> Rule:
        return lambda b, h, q, k: table[q] > 0

    table = torch.arange(3)
    rule, gone = rule_of(table), weakref.ref(table)
    seen = Unchanged([rule])
    rule.__closure__[0].cell_contents = None  # type: ignore[index]
    del table
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="table has changed"):
        seen.check()
