"""What kernels declare: nothing misspelt, nothing that their methods contradict, asked in one way.

A trait that nobody reads, or a method that no trait tells of, would be a default in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.kernels import (
    CallShape,
    CpuKernel,
    DenseKernel,
    Extent,
    RectangleKernel,
    Traits,
    get_kernel,
    kernels,
    register_kernel,
    registry,
    task_calls,
    traits,
    traits_of,
    whole_calls,
)
from quorum_attention.kernels.kit import from_lse_function, from_score_mod, sliding_window

ROOT = Path(qa.__file__).parent
OUTSIDE = sorted(p for p in ROOT.rglob("*.py") if (ROOT / "kernels") not in p.parents)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))


class Plain:
    """The base protocol and no more: what a user may have written before there were traits."""

    name = "plain"
    inner = DenseKernel()

    def refusal(self, call: CallShape) -> str | None:
        return self.inner.refusal(call)

    def forward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        return self.inner.forward_workspace_bytes(call, extent)

    def backward_workspace_bytes(self, call: CallShape, extent: Extent) -> int:
        return self.inner.backward_workspace_bytes(call, extent)

    def forward(self, task: Any, state: Any) -> None:
        self.inner.forward(task, state)

    def backward(self, task: Any, grads: Any) -> None:
        self.inner.backward(task, grads)


def attention(query, key, value, *, is_causal, scale):  # type: ignore[no-untyped-def]
    raise AssertionError("not called here")


EVERY = {
    **kernels(),
    "windowed native": qa.NativeKernel(window=8),
    "function": from_lse_function(attention),
    "flex": from_score_mod(None, sliding_window(9), compiled=True),
    "flex in memory": from_score_mod(None, sliding_window(9), compiled=False),
    "longnet": qa.LongNetKernel([(8, 1)]),
    "plain": Plain(),
}


@pytest.mark.parametrize("name", EVERY)
def test_kernels_are_what_they_declare(name: str) -> None:
    assert traits.contradiction(EVERY[name]) is None


def test_a_plain_kernel_has_every_default() -> None:
    assert traits_of(Plain()) == Traits()
    q = torch.randn(1, 2, 40, 8)
    report = qa.Report()
    found = qa.attention(q, q, q, kernel=Plain(), depth=1, devices="cpu", report=report)
    torch.testing.assert_close(found, qa.attention(q, q, q, kernel="dense", devices="cpu"))


def test_what_is_asked_is_what_is_declared() -> None:
    """The kernel itself comes back, or None."""
    for kernel in EVERY.values():
        for ask in (
            traits.captures, traits.sparse, whole_calls, task_calls, traits.operator,
            traits.measured,
        ):  # fmt: skip
            wanted = kernel if getattr(traits_of(kernel), ask.__name__) else None
            assert ask(kernel) is wanted
    assert {name for name, kernel in EVERY.items() if task_calls(kernel)} == {"flex"}
    assert whole_calls(EVERY["dense"]) is None
    assert whole_calls(EVERY["cpu"]) is not None


def test_scores_that_users_changed_are_no_plain_softmax() -> None:
    changed = traits_of(EVERY["windowed native"])
    assert not changed.plain_softmax
    assert changed.probed_as is not None
    assert traits_of(changed.probed_as) is qa.NativeKernel.traits
    assert qa.NativeKernel.traits.plain_softmax


def test_a_misspelt_trait_is_an_error_where_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="own_atention"):

        class Misspelt(Plain):
            traits = Traits(own_atention=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Traits(whole_tasks="yes"), TypeError, "whole_tasks must be True or False"),
        (lambda: Traits(rates=0.5), TypeError, "rates must be two numbers"),
        (lambda: Traits(rates=(0.5,)), TypeError, "rates must be two numbers"),
        (lambda: Traits(rates=(0.5, 0.0)), ValueError, "rates must be above 0"),
        (lambda: Traits(launch_seconds=(1.0, float("nan"))), ValueError, "launch_seconds must be"),
        (lambda: Traits(scaled_backward=True), TypeError, "scaled_backward must be a frozenset"),
        (
            lambda: Traits(whole_tasks=True, several_streams=True), ValueError,
            "a task is one launch, or several",
        ),
        (lambda: Traits(operator=True), ValueError, "operator without whole_calls"),
    ],
)  # fmt: skip
def test_traits_that_make_no_sense(
    make: Callable[[], Traits], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make()


def _misses_a_method() -> Plain:
    class InPlace(Plain):
        traits = Traits(task_calls=True)

        def takes_tasks(self, dtype: torch.dtype) -> bool:
            return True

        def task_span(self, task: Any) -> None:
            return None

    return InPlace()


def _keeps_a_method_to_itself() -> Plain:
    class Reads(Plain):
        def captured(self) -> list[torch.Tensor]:
            return []

    return Reads()


def _says_it_beside_its_traits() -> Plain:
    class Old(Plain):
        own_attention = True

    return Old()


def _forgets_what_it_is_made_of() -> RectangleKernel:
    class Mine(CpuKernel):
        traits = Traits(own_attention=True)

    return Mine()


def _has_something_else() -> Plain:
    class Listed(Plain):
        traits = ("own_attention",)

    return Listed()


CONTRADICTIONS = {
    _misses_a_method: r"its traits say task_calls, but it lacks task_forward, task_backward",
    _keeps_a_method_to_itself: r"it has captured, but its traits do not say captures=True",
    _says_it_beside_its_traits: r"traits = Traits\(own_attention=\.\.\.\)",
    _forgets_what_it_is_made_of: r"takes_whole.*do not say whole_calls=True",
    _has_something_else: r"its traits must be Traits",
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("make", CONTRADICTIONS, ids=lambda make: make.__name__.strip("_"))
def test_a_kernel_that_contradicts_itself_is_refused(make: Callable[[], Any]) -> None:
    """Registered, or handed to a call as it is; and not only the first time."""
    kernel, words = make(), CONTRADICTIONS[make]
    q = torch.randn(1, 1, 10, 8)
    for _ in range(2):
        with pytest.raises(TypeError, match=words):
            register_kernel(kernel)
        with pytest.raises(TypeError, match=words):
            get_kernel(kernel)
        with pytest.raises(TypeError, match=words):
            qa.attention(q, q, q, kernel=kernel, devices="cpu")
    assert kernel.name == "cpu" or kernel.name not in kernels()


def test_traits_that_change_are_checked_again() -> None:
    kernel = CpuKernel()
    assert get_kernel(kernel) is kernel
    kernel.traits = replace(kernel.traits, task_calls=True)
    with pytest.raises(TypeError, match="lacks takes_tasks"):
        get_kernel(kernel)
    kernel.traits = CpuKernel.traits
    assert get_kernel(kernel) is kernel


# How the rest of the package may not ask.
_CLASSES = {"Captures", "Sparse", "WholeCalls", "TaskCalls", "Operator", "Measured"}
_NAMES = {name for names in traits.METHODS.values() for name in names} | {
    one.name for one in fields(Traits)
}


def _asked_otherwise(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            line = ast.unparse(node)
            if "RectangleKernel" in line or "kernels.rectangles" in line:
                yield line
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        named = {
            part.id if isinstance(part, ast.Name) else part.attr
            for argument in node.args
            for part in ast.walk(argument)
            if isinstance(part, (ast.Name, ast.Attribute))
        }
        if node.func.id in ("isinstance", "issubclass", "cast"):
            if any(name in _CLASSES or name.endswith("Kernel") for name in named):
                yield ast.unparse(node)
        elif node.func.id in ("getattr", "hasattr"):
            of_a_kernel = any("kernel" in name.lower() for name in named)
            literal = {a.value for a in node.args if isinstance(a, ast.Constant)}
            if of_a_kernel or literal & _NAMES:
                yield ast.unparse(node)


def test_only_kernels_ask_for_classes_and_attributes() -> None:
    """Everybody else asks ``traits_of`` and the functions beside it."""
    found = {
        str(path.relative_to(ROOT)): asked
        for path in OUTSIDE
        if (asked := list(_asked_otherwise(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(kernel, RectangleKernel)",
        "isinstance(call.kernel, (str, InnerKernel))",
        "cast(WholeCalls, call.kernel)",
        'getattr(call.kernel, "anything", False)',
        'getattr(found, "own_attention", False)',
        'hasattr(inner, "takes_whole")',
        "from quorum_attention.kernels.rectangles import RectangleKernel",
        "from quorum_attention.kernels import RectangleKernel",
    ],
)
def test_that_would_be_seen(line: str) -> None:
    assert list(_asked_otherwise(ast.parse(line))) == [line.replace('"', "'")]
