"""A number that a user's function reads and that changes between a forward and its
backward: gradients were those of no call, without a word."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import quorum_attention as qa
from quorum_attention import autograd
from quorum_attention.distributed import attention as sharded_attention
from quorum_attention.kernels.masked import read_values

Attend = Callable[[torch.Tensor], torch.Tensor]
Keeps = Callable[..., torch.Tensor]
Setter = Callable[[int], None]

WINDOW = 64
settings = types.ModuleType("settings")


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(read_values, "_NAMED", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*can read changed")
        yield


def _near(query: torch.Tensor, key: torch.Tensor, n: int) -> torch.Tensor:
    return (query - key).abs() < n


class Rule:
    """A mask's function that is an object."""

    window = 64

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, self.window)

    def by_helper(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.helper(q, k)

    def helper(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return _near(query, key, self.doubled // 2)

    @property
    def doubled(self) -> int:
        return 2 * self.window


@dataclass(slots=True)
class Slots:
    window: int = 64


def _set_global(n: int) -> None:
    global WINDOW
    WINDOW = n


def _in_module() -> tuple[Keeps, Setter]:
    settings.window = 64  # type: ignore[attr-defined]
    set_window = partial(setattr, settings, "window")
    return lambda b, h, q, k: _near(q, k, settings.window), set_window


def _in_closure() -> tuple[Keeps, Setter]:
    window: int | None = 64

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, window or 300)

    def set_window(n: int) -> None:
        nonlocal window
        window = None if n == 300 else n

    return keeps, set_window


def _as_attribute(method: str) -> tuple[Keeps, Setter]:
    rule = Rule()
    return getattr(rule, method), partial(setattr, rule, "window")


def _in_slot() -> tuple[Keeps, Setter]:
    slots = Slots()
    return lambda b, h, q, k: _near(q, k, slots.window), partial(
        setattr, slots, "window"
    )


def _in_containers() -> tuple[Keeps, Setter]:
    sizes = {"layer": [(1,), [64]]}
    set_window = partial(sizes["layer"][1].__setitem__, 0)  # type: ignore[attr-defined]
    return lambda b, h, q, k: _near(q, k, sizes["layer"][1][0]), set_window  # type: ignore[arg-type]


PLACES: dict[str, tuple[Callable[[], tuple[Keeps, Setter]], str]] = {
    "global": (lambda: (lambda b, h, q, k: _near(q, k, WINDOW), _set_global), "WINDOW"),
    "module": (_in_module, "settings.window"),
    "closure": (_in_closure, "window"),
    "object": (partial(_as_attribute, "__call__"), "self.window"),
    "helper": (partial(_as_attribute, "by_helper"), "self.window"),
    "slot": (_in_slot, "slots.window"),
    "containers": (_in_containers, r"sizes\['layer'\]\[1\]\[0\]"),
}


def _inputs() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(1, 2, 150, 8, generator=g, requires_grad=True)


def _changed(name: str, before: int, after: int | None) -> Any:
    return pytest.warns(match=rf"backward: .*{name}, {before} then {after};")


@pytest.mark.parametrize("after", [17, 300])
@pytest.mark.parametrize("place", PLACES)
def test_a_changed_number_is_named_wherever_it_is_read(place: str, after: int) -> None:
    make, name = PLACES[place]
    keeps, set_number = make()
    x = _inputs()
    set_number(64)
    out = qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps))
    set_number(after)
    shown = None if (place, after) == ("closure", 300) else after
    with _changed(name, 64, shown):
        out.sum().backward()
    set_number(64)  # back again, and of a call of its own: nothing to say
    out = qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps))
    set_number(after)
    set_number(64)
    out.sum().backward()


def _with_mask(rule: Rule, **options: Any) -> Attend:
    mask = qa.Mask(keeps=rule)
    return lambda x: qa.attention(x, x, x, attn_mask=mask, **options)


def _with_either(rule: Rule) -> Attend:
    mask = qa.Mask(keeps=rule) | qa.Mask(keeps=lambda b, h, q, k: q == k)
    return lambda x: qa.attention(x, x, x, attn_mask=mask)


def _with_score_mod(rule: Rule) -> Attend:
    def modify(score: Any, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return score / rule.window

    kernel = qa.from_score_mod(modify, compiled=False)
    return lambda x: qa.attention(x, x, x, kernel=kernel, depth=2)


def _with_flex_function(rule: Rule) -> Attend:
    """Only the table gets a gradient."""
    table = torch.ones(2, requires_grad=True)

    def attend(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        with qa.patched_flex_attention(min_tokens=1):
            out = torch_flex.flex_attention(
                x, x, x, score_mod=lambda s, b, h, q, k: s + table[h] * rule.window
            )
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def _split(rule: Rule) -> Attend:
    mask = qa.Mask(keeps=rule)

    def attend(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.bfloat16)
        return qa.attention(x, x, x, attn_mask=mask, exact_delta=True)

    return attend


WAYS: dict[str, Callable[[Rule], Attend]] = {
    "uncut": _with_mask,
    "budget": partial(_with_mask, budget="13MiB"),
    "tasks": partial(_with_mask, depth=2),
    "either": _with_either,
    "score_mod": _with_score_mod,
    "table": _with_flex_function,
    "exact_delta": _split,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_call_tells(way: str) -> None:
    rule = Rule()
    out = WAYS[way](rule)(_inputs())
    rule.window = 17
    with _changed("window", 64, 17):
        out.sum().backward()


def test_ranks_tell() -> None:
    rule = Rule()
    x = _inputs()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mask = qa.Mask(keeps=rule)
        out = sharded_attention(x, x, x, attn_mask=mask)
        rule.window = 17
        with _changed("Rule.window", 64, 17):
            out.sum().backward()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_compares_with_its_second_run(use_reentrant: bool) -> None:
    """Each layer sets its number before it attends, also in the second run: gradients
    are right, and nothing is said."""
    rule = Rule()
    attend = _with_mask(rule)

    def layer(x: torch.Tensor, window: int) -> torch.Tensor:
        rule.window = window
        return attend(x)

    gradients: list[torch.Tensor] = []
    for window in (5, 64):
        x = _inputs()
        out = checkpoint(layer, x, window, use_reentrant=use_reentrant)
        rule.window = 17
        out.square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    x = _inputs()
    layer(x, 5).square().sum().backward()
    torch.testing.assert_close(x.grad, gradients[0])
    assert not torch.equal(*gradients)


def test_a_checkpoint_takes_a_number_of_more_digits() -> None:
    """As a counter of steps may have in the second run: torch compares the sizes of
    what both runs save."""
    rule = Rule()
    out = checkpoint(_with_mask(rule), _inputs(), use_reentrant=False)
    rule.window = 1000
    out.sum().backward()


def test_results_that_a_checkpoint_stored_are_of_the_first_run() -> None:
    """The second run does not compute them, so its numbers are not theirs."""
    rule = Rule()
    attend = _with_mask(rule)
    stored: list[Any] = []

    def results(compute: Callable[[], Any]) -> Any:
        if not stored:
            stored.append(compute())
        return stored[0]

    token = autograd.result_hook.set(results)
    try:
        out = checkpoint(attend, _inputs(), use_reentrant=False)
        rule.window = 17
        with _changed("Rule.window", 64, 17):
            out.sum().backward()
    finally:
        autograd.result_hook.reset(token)


def test_a_number_is_named_once_and_others_still_are() -> None:
    steps = types.SimpleNamespace(count=0, window=64, seen=[0])

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, steps.window + 0 * steps.count + 0 * len(steps.seen))

    x = _inputs()

    def train(**after: Any) -> list[str]:
        out = qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps))
        vars(steps).update(after)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out.sum().backward()
        return [str(warning.message) for warning in caught]

    assert [len(train(count=n)) for n in (1, 2, 3)] == [1, 0, 0]
    assert train(seen=[0, 1, 2]) == []  # what the forward had is as it was
    (text,) = train(window=17)
    assert "steps.window, 64 then 17" in text


def _near_of(sets: types.SimpleNamespace) -> Keeps:
    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, sets.window)

    return keeps


@pytest.mark.parametrize("changed", [0, 1])
def test_functions_of_one_name_have_numbers_of_their_own(changed: int) -> None:
    """A change of the first one's number had been hidden by that of the second."""
    sets = [types.SimpleNamespace(window=64), types.SimpleNamespace(window=32)]
    first, second = map(_near_of, sets)

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return first(b, h, q, k) | second(b, h, q, k)

    x = _inputs()
    out = qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps))
    sets[changed].window = 17
    with pytest.warns(match="64, 32 then (17, 32|64, 17);"):
        out.sum().backward()


def test_a_number_of_many_bits_can_be_read() -> None:
    """Python refuses to write it in decimal digits, and calls ended with that error."""
    sets = types.SimpleNamespace(window=64, bits=1 << 20_000)

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, sets.window + sets.bits % 2)

    x = _inputs()
    out = qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps))
    sets.bits += 1
    with pytest.warns(match="sets.bits, 0x10+ then 0x10+1;"):
        out.sum().backward()


def test_a_function_that_counts_its_own_calls_is_not_reported() -> None:
    calls = types.SimpleNamespace(count=0)

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        calls.count += 1
        return _near(q, k, 64)

    x = _inputs()
    qa.attention(x, x, x, attn_mask=qa.Mask(keeps=keeps)).sum().backward()
    assert calls.count


def _in_array() -> tuple[Keeps, Setter]:
    sizes = np.array([[64]])
    return lambda b, h, q, k: _near(q, k, int(sizes[0, 0])), sizes.fill


def _in_set() -> tuple[Keeps, Setter]:
    sizes = {64}

    def set_window(n: int) -> None:
        sizes.clear()
        sizes.add(n)

    return lambda b, h, q, k: _near(q, k, max(sizes)), set_window


def _in_range() -> tuple[Keeps, Setter]:
    sizes = [range(64)]
    set_window: Setter = lambda n: sizes.__setitem__(0, range(n))  # noqa: E731
    return lambda b, h, q, k: _near(q, k, len(sizes[0])), set_window


def _in_view_of_dictionary() -> tuple[Keeps, Setter]:
    sizes = {"window": 64}
    view = types.MappingProxyType(sizes)
    set_window = partial(sizes.__setitem__, "window")
    return lambda b, h, q, k: _near(q, k, view["window"]), set_window


@pytest.mark.parametrize(
    "make", [_in_array, _in_set, _in_range, _in_view_of_dictionary]
)
def test_numbers_of_other_containers_are_read_too(
    make: Callable[[], tuple[Keeps, Setter]],
) -> None:
    """Blocks had been those of the number before, and gradients of no call, without a
    word."""
    keeps, set_number = make()
    x = torch.randn(1, 1, 600, 8, requires_grad=True)
    mask = qa.Mask(keeps=keeps)
    set_number(1)
    torch.testing.assert_close(qa.attention(x, x, x, attn_mask=mask), x)
    set_number(1000)
    out = qa.attention(x, x, x, attn_mask=mask)
    torch.testing.assert_close(out, qa.attention(x, x, x))
    set_number(1)
    with pytest.warns(match="can read changed"):
        out.sum().backward()


def test_a_text_that_changes_makes_another_mask() -> None:
    """Without a word, blocks were those of the text before."""
    kind = "near"

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _near(q, k, 1) if kind == "near" else torch.as_tensor(k >= 0)

    x = torch.randn(1, 1, 600, 8)
    mask = qa.Mask(keeps=keeps)
    torch.testing.assert_close(qa.attention(x, x, x, attn_mask=mask), x)
    kind = "all"
    out = qa.attention(x, x, x, attn_mask=mask)
    torch.testing.assert_close(out, qa.attention(x, x, x))
