"""Kernels from functions: exact where those are right; what they are seen to read."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.attention import attention, fresh_generator
from torch.nn.functional import scaled_dot_product_attention as sdpa

import quorum_attention as qa
from quorum_attention.decomposition import Ranges
from quorum_attention.kernels.kit import document, from_lse_function, sliding_window
from quorum_attention.kernels.masked.captured_tensors import codes, tensors, versions


def size_of_the_scale(query, key, value, *, is_causal, scale):
    """Right for every scale above 0."""
    return attention(query, key, value, is_causal=is_causal, scale=abs(scale))


@pytest.mark.slow
def test_a_function_for_scales_above_0_says_so() -> None:
    g = fresh_generator()
    q, k, v = (torch.randn(1, 2, 30, 8, generator=g) for _ in range(3))
    kernel = from_lse_function(size_of_the_scale, positive_scale=True)
    assert qa.check_kernel(kernel, n_tokens=61, levels=[(3,)], other_sizes=False)
    for scale in (-0.3, 0.0):
        with pytest.raises(NotImplementedError, match="for a scale above 0"):
            qa.attention(q, k, v, scale=scale, kernel=kernel, devices="cpu")
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    out = qa.attention(q, k, v, scale=0.3, kernel=kernel, devices="cpu")
    torch.testing.assert_close(out, wanted)


def test_what_a_function_must_be() -> None:
    with pytest.raises(TypeError, match="function must be callable"):
        from_lse_function(3)
    with pytest.raises(TypeError, match="must have a parameter 'is_causal'"):
        from_lse_function(lambda query, key, value: None)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda value: value, r"must return \(out, lse\)"),
        (lambda value: (value, value), "must return lse of shape"),
        (lambda value: (value, None), "must return a tensor as lse, got None"),
    ],
)
def test_what_a_function_must_return(result, words: str) -> None:
    def wrong(query, key, value, *, is_causal, scale):
        return result(value)

    q = torch.randn(1, 1, 20, 4)
    with pytest.raises((TypeError, ValueError), match=words):
        qa.attention(q, q, q, kernel=from_lse_function(wrong), devices="cpu")


def test_an_lse_has_a_gradient_and_a_mask_is_the_functions() -> None:
    def dead_lse(query, key, value, *, is_causal, scale):
        out, lse = attention(query, key, value, is_causal=is_causal, scale=scale)
        return out, lse.detach()

    q = torch.randn(1, 1, 20, 4)
    leaf = q.clone().requires_grad_()
    out = qa.attention(leaf, q, q, kernel=from_lse_function(dead_lse), devices="cpu")
    with pytest.raises(TypeError, match="an lse without a gradient"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="takes no attention mask"):
        qa.attention(q, q, q, attn_mask=torch.ones(20, 20, dtype=torch.bool),
                     kernel=from_lse_function(attention), devices="cpu")  # fmt: skip


def in_fp32(query, key, value, *, is_causal, scale):
    """Returns more digits than its inputs have."""
    return attention(
        query.float(), key.float(), value.float(), is_causal=is_causal, scale=scale
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_nearly_one_key_have_no_gradient_of_their_rounding(dtype) -> None:
    """Where P is 1, dS is 0: the row's output was rounded to 16 bits, that of autograd
    was not."""
    g = fresh_generator()
    key = 2 * torch.randn(2, 3, 40, 16, generator=g)
    query = 4 * key[:, :, torch.randperm(40, generator=g)[:30]]
    three = (query, key, 9 * torch.randn(2, 3, 40, 16, generator=g))
    upstream = torch.randn(2, 3, 30, 16, generator=g).to(dtype)
    q, k, v = (t.to(dtype).requires_grad_() for t in three)
    out = qa.attention(q, k, v, kernel=from_lse_function(in_fp32), devices="cpu")
    mine = torch.autograd.grad(out, (q, k, v), upstream)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*exact)
    theirs = torch.autograd.grad(wanted, exact, upstream.double())
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        # One unit in the last place of the largest, and what fp32 makes of scores of
        # hundreds.
        limit = torch.finfo(dtype).eps * other.abs().max() + 2e-4
        assert (one.double() - other).abs().max() <= limit


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
    within = (lambda f: lambda b, h, q, k: f(b, h, q, k))(
        lambda b, h, q, k: table[q] > 0
    )
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


LENGTH = torch.tensor(300)
N_FIRST = 300


def _is_before(key: torch.Tensor) -> torch.Tensor:
    return key < LENGTH


class FirstKeys:
    """An object whose class reads a global."""

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return _is_before(k)


@pytest.mark.parametrize(
    "keeps", [lambda b, h, q, k: _is_before(k), FirstKeys(), FirstKeys().__call__]
)
def test_a_global_tensor_that_is_written_to_is_seen(keeps: Any) -> None:
    """As tensors of scripts and notebooks are: without a word, blocks were those of the
    tensor as it was, and so were gradients."""
    x = torch.randn(1, 1, 600, 8, requires_grad=True)
    mask = qa.Mask(keeps=keeps)
    for length in (300, 600, 1):
        LENGTH.fill_(length)
        out = qa.attention(x, x, x, attn_mask=mask)
        expected = sdpa(x, x[..., :length, :], x[..., :length, :])
        torch.testing.assert_close(out, expected)
    LENGTH.fill_(300)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_another_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, blocks were those of the number before."""
    n_closed = 300

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return torch.as_tensor(k < min(n_closed, N_FIRST))

    x = torch.randn(1, 1, 600, 8)
    mask = qa.Mask(keeps=keeps)
    for length in (300, 600, 1):
        monkeypatch.setattr(sys.modules[__name__], "N_FIRST", length)
        n_closed = length
        out = qa.attention(x, x, x, attn_mask=mask)
        expected = sdpa(x, x[..., :length, :], x[..., :length, :])
        torch.testing.assert_close(out, expected)


def test_many_numbers_take_no_time() -> None:
    table = torch.ones(5)
    numbers = list(range(100_000))

    def keeps(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return table[q] > numbers[0]

    assert len(versions(keeps)) < 300
    assert tensors([keeps]) == [table]


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
        mask.verdict(Ranges.from_bounds(0, 10, 0, 10))


def test_masks_made_again_have_the_same_code() -> None:
    cpu = torch.device("cpu")
    window, other, ids = (
        codes(mask.mask_mod(cpu))
        for mask in (sliding_window(4), sliding_window(5), document(torch.arange(3)))
    )
    assert window == other
    assert window != ids
