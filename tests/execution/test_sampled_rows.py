"""Gradients are those of the forward's attention: a function that says something else in the
backward is an error, however it came to."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import quorum_attention as qa
from quorum_attention import Mask

N = 40
CHANGED = "has changed between the forward and its backward"
width = 5


class Rules:
    """Keeps what is read in ways that no walk over code finds."""

    width = 5
    beside: ClassVar = OrderedDict(width=5)
    __slots__ = ("line", "numbers", "own", "table")

    def __init__(self) -> None:
        self.own, self.line, self.numbers = 5, deque([5]), np.full(1, 5)
        self.table = {"ids": [torch.arange(N) // 7]}

    @property
    def half(self) -> int:
        return self.own // 2

    def method(self) -> int:
        return self.own


def three(dtype: torch.dtype = torch.float32, n: int = N) -> list[torch.Tensor]:
    return [torch.randn(1, 2, n, 8, dtype=dtype).requires_grad_() for _ in range(3)]


def _wider() -> None:
    global width
    width += 3


def _by_global(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.as_tensor((q - k).abs() < width)


def made(kind: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """A rule, and what changes what it reads."""
    rules, layer = Rules(), torch.nn.Module()
    layer.register_buffer("width", torch.tensor(5))
    reads: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "a class's attribute": (lambda: Rules.width, lambda: setattr(Rules, "width", 9)),
        "a slot": (lambda: rules.own, lambda: setattr(rules, "own", 9)),
        "a property": (lambda: rules.half, lambda: setattr(rules, "own", 19)),
        "a method": (lambda: rules.method(), lambda: setattr(rules, "own", 9)),
        "by getattr": (lambda: getattr(rules, "o" + "wn"), lambda: setattr(rules, "own", 9)),
        "an ordered dictionary": (
            lambda: rules.beside["width"], lambda: rules.beside.update(width=9),
        ),
        "a deque": (lambda: rules.line[-1], lambda: rules.line.append(9)),
        "numbers of NumPy": (lambda: int(rules.numbers[0]), lambda: rules.numbers.fill(9)),
        "a module's attribute": (
            lambda: sys.modules[__name__].width, lambda: _wider(),  # type: ignore[attr-defined]
        ),
        "a buffer by .data": (lambda: layer.width, lambda: layer.width.data.fill_(9)),
        "a number": (partial(lambda s: s[0], state := [5]), lambda: state.__setitem__(0, 9)),
    }  # fmt: skip
    if kind == "a global":
        return _by_global, _wider
    read, change = reads[kind]
    return lambda b, h, q, k: (q - k).abs() < read(), change


KINDS = [
    "a class's attribute", "a slot", "a property", "a method", "by getattr",
    "an ordered dictionary", "a deque", "numbers of NumPy", "a module's attribute",
    "a buffer by .data", "a number", "a global",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rules, "width", 5)
    monkeypatch.setitem(Rules.beside, "width", 5)
    monkeypatch.setitem(globals(), "width", 5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_that_changes_before_the_backward_is_an_error(kind: str, depth: int) -> None:
    rule, change = made(kind)
    mask = Mask(keeps=rule) if depth == 0 else Mask(causal=True) & Mask(keeps=rule)
    out = qa.attention(*three(), attn_mask=mask, depth=depth)
    out.sum().backward(retain_graph=True)
    change()
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["mask_mod", "score_mod", "function"])
def test_so_is_a_kernel_of_functions(what: str, kind: str) -> None:
    rule, change = made(kind)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - torch.where(rule(b, h, q, k), 0.0, 3.0)

    def function(
        query: Any, key: Any, value: Any, *, is_causal: bool, scale: float,
        query_positions: Any, key_positions: Any,
    ) -> Any:  # fmt: skip
        kept = rule(0, 0, query_positions[:, None], key_positions[None])
        scores = (scale * (query @ key.mT)).masked_fill(~kept, -9.0)
        if is_causal:
            later = torch.ones_like(scores).triu(1).bool()
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ value, scores.logsumexp(-1)

    kernel: Any = {
        "mask_mod": lambda: qa.from_score_mod(mask_mod=rule, compiled=False),
        "score_mod": lambda: qa.from_score_mod(score_mod, compiled=False),
        "function": lambda: qa.from_lse_function(function),
    }[what]()
    out = qa.attention(*three(), kernel=kernel, is_causal=True)
    out.sum().backward(retain_graph=True)
    change()
    with pytest.raises(RuntimeError, match=CHANGED):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [None, "40MiB"])
def test_masks_with_everything_that_stay_what_they_are(
    dtype: torch.dtype, budget: str | None
) -> None:
    """No false alarm, in many draws: sinks, soft caps, biases, dropout, grouped heads, rows without
    a key, keys that are not finite, large scores, other lengths."""
    torch.manual_seed(5)
    for i in range(40):
        n, m, heads, kv = (int(x) for x in (*torch.randint(1, 90, (2,)), 2 << i % 2, 2))
        q = torch.randn(2, heads, n, 8, dtype=dtype) * (30.0 if i % 5 == 0 else 1.0)
        k, v = (torch.randn(2, kv, m, 8, dtype=dtype) for _ in range(2))
        if i % 7 == 0:
            v[0, 0, 0] = torch.inf
        mask = Mask(
            keeps=lambda b, h, q, k, i=i: (q * 7 + k * 3 + h + b) % 5 > i % 4,
            causal=i % 3 == 0,
            sinks=torch.randn(heads) if i % 2 else None,
            softcap=20.0 if i % 4 == 1 else None,
            bias=torch.randn(n, m, dtype=dtype) if i % 4 == 2 else None,
        )
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out = qa.attention(
            *inputs, attn_mask=mask, enable_gqa=True, budget=budget,
            dropout_p=0.3 if i % 6 == 0 else 0.0,
        )  # fmt: skip
        out.sum().backward()


def test_a_kernel_registered_anew_is_not_the_forwards() -> None:
    def kernel_of(factor: float) -> Any:
        def function(query: Any, key: Any, value: Any, *, is_causal: bool, scale: float) -> Any:
            scores = factor * scale * (query @ key.mT)
            if is_causal:
                later = torch.ones_like(scores).triu(1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            return scores.softmax(-1) @ value, scores.logsumexp(-1)

        return qa.from_lse_function(function, name="registered anew")

    def compiled(*given: torch.Tensor) -> torch.Tensor:
        return qa.attention(*given, kernel="registered anew")

    for call in (compiled, torch.compile(compiled, backend="aot_eager")):
        found = []
        for anew in (False, True):
            qa.register_kernel(kernel_of(1.0))
            torch.manual_seed(0)
            given = three(torch.float64)
            out = call(*given)
            if anew:
                qa.register_kernel(kernel_of(4.0))
            out.sum().backward()
            found.append(given[0].grad)
        assert torch.equal(*found)  # type: ignore[arg-type]


def test_a_captured_tensor_of_compiled_code_is_written_to() -> None:
    lengths = torch.tensor([9])

    def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < lengths[b]) | (q == k)

    mask = Mask(keeps=keeps)
    out = torch.compile(lambda *t: qa.attention(*t, attn_mask=mask), backend="aot_eager")(*three())
    lengths.fill_(20)
    with pytest.raises(RuntimeError, match=f"{CHANGED}|modified by an inplace"):
        out.sum().backward()


def test_a_backward_by_hand_is_checked_as_well() -> None:
    rule, change = made("a slot")
    q, k, v, grad = (t.detach() for t in (*three(), *three()[:1]))
    out, lse = qa.attention_with_lse(q, k, v, Mask(keeps=rule))
    qa.attention_backward(grad, q, k, v, out, lse, Mask(keeps=rule))
    change()
    with pytest.raises(RuntimeError, match=CHANGED):
        qa.attention_backward(grad, q, k, v, out, lse, Mask(keeps=rule))


def test_what_touches_only_rows_that_were_not_drawn_escapes() -> None:
    """As the documentation says; drawn, one pair of weight is enough."""
    from quorum_attention.execution import sampled_rows

    keep = [torch.tensor(True)]

    def keeps(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q != 1000) | (k != 3)) | keep[0]

    given = three(n=2000)
    with torch.no_grad():
        given[0][..., 1000, :] = 2 * given[1][..., 3, :]
    out = qa.attention(*given, attn_mask=Mask(keeps=keeps))
    keep[0] = torch.tensor(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_rows, "_drawn", lambda n: [1, 999])
        out.sum().backward(retain_graph=True)
        patch.setattr(sampled_rows, "_drawn", lambda n: [999, 1000])
        with pytest.raises(RuntimeError, match=CHANGED):
            out.sum().backward()


@pytest.mark.parametrize("keys", [1, 2047, 2048, 5000])
def test_products_by_runs_of_keys(keys: int) -> None:
    from quorum_attention.execution.sampled_rows import _product

    p, value = torch.randn(2, 3, 2, 4, keys).double(), torch.randn(2, 3, 1, keys, 5).double()
    assert torch.allclose(_product(p, value), p @ value)
