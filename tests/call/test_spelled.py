"""Options and masks as a string: plain values spelled out, numbers taken out, objects numbered."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.call import spelled as module
from quorum_attention.call.options import Written
from quorum_attention.call.spelled import Parts, numbered, read
from quorum_attention.kernels import DenseKernel


def spelled(mask: qa.Mask | None = None, **said: Any) -> tuple[str, Parts]:
    parts = Parts()
    return parts.spelled(Written(**said), mask), parts


def back(text: str, parts: Parts) -> tuple[Written, qa.Mask | None]:
    return read(text, parts.numbers, parts.tensors)


def test_defaults_are_nothing() -> None:
    text, parts = spelled()
    assert text == ""
    assert back(text, parts) == (Written(), None)


@pytest.mark.parametrize(
    "said",
    [
        {"budget": "2GiB"},
        {"budget": 12345},
        {"depth": 2, "accumulator": "host"},
        {"kernel": 'it\'s "named" so'},
        {"devices": "cpu"},
        {"devices": torch.device("cuda", 1)},
        {"devices": [torch.device("cpu"), "cpu"]},
        {"devices": ("cpu", "cuda")},
        {"devices": ("number", "cpu")},
        {"progress": True},
    ],
)
def test_plain_values_are_the_same_in_any_process(said: dict[str, object]) -> None:
    text, parts = spelled(**said)
    assert module._HERE not in text
    assert back(text, parts) == (Written(**said), None)


def test_numbers_may_differ_in_one_text() -> None:
    one, other = spelled(budget=10, depth=1), spelled(budget=20, depth=2)
    assert one[0] == other[0]
    assert back(*other)[0].budget == 20


def test_objects_are_the_very_same_and_others_are_others() -> None:
    kernel, other, report = DenseKernel(), DenseKernel(), qa.Report()
    plan = qa.plan(60, heads=2, head_dim=8)
    text, parts = spelled(kernel=kernel, report=report, plan=plan)
    found = back(text, parts)[0]
    assert (found.kernel, found.report, found.plan) == (kernel, report, plan)
    assert found.kernel is kernel
    assert text == spelled(kernel=kernel, report=report, plan=plan)[0]
    assert spelled(kernel=other)[0] != spelled(kernel=kernel)[0]


def test_masks_of_every_field_and_masks_of_masks() -> None:
    def keeps(b, h, q, k):  # type: ignore[no-untyped-def]
        return q > k

    ids = torch.arange(9)
    inner = qa.Mask(causal="lower_right", offset=3) | qa.Mask(documents=(ids, ids + 1))
    mask = qa.Mask(
        causal=True, window=(3, -1), chunk=4, key_lengths=ids, key_padding=ids > 2, keeps=keeps,
        softcap=2.5, either=inner.either, documents=ids,
    )  # fmt: skip
    found = back(*spelled(mask))[1]
    for name in ("causal", "offset", "window", "chunk", "keeps", "softcap"):
        assert getattr(found, name) == getattr(mask, name)
    assert found.documents is ids
    assert found.key_padding is mask.key_padding
    assert found.either[0].causal == "lower_right"
    assert found.either[0].offset == 3
    assert found.either[1].documents[1] is inner.either[1].documents[1]


def test_they_are_let_go_and_their_numbers_never_used_again() -> None:
    numbers = set()
    for _ in range(50):
        objects = [DenseKernel()]  # often at the same address
        numbers.add(numbered(objects[0]))
        text, parts = spelled(kernel=objects[0])
        parts.objects.clear()
        objects.clear()
        gc.collect()
        with pytest.raises(RuntimeError, match="as kernel is gone, or was one of another process"):
            back(text, parts)
    assert len(numbers) == 50
    assert not numbers & set(module._object)


def test_bound_methods_live_on() -> None:
    told: list[object] = []
    text, parts = spelled(progress=told.append)
    parts.objects.clear()
    gc.collect()
    back(text, parts)[0].progress(1)
    assert told == [1]


def test_a_number_of_another_process_is_nobody_s() -> None:
    text, parts = spelled(kernel=DenseKernel())
    with pytest.raises(RuntimeError, match="another process"):
        back(text.replace(module._HERE, "abc"), parts)
